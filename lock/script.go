package lock

import (
	_ "embed"

	"github.com/singlefill/singlefill/internal/client"
)

var (
	//go:embed lua/mutex_acquire.lua
	mutexAcquireLua string
	//go:embed lua/mutex_renew.lua
	mutexRenewLua string
	//go:embed lua/mutex_release.lua
	mutexReleaseLua string
	//go:embed lua/mutex_abandon.lua
	mutexAbandonLua string
	//go:embed lua/fair_acquire.lua
	fairAcquireLua string
	//go:embed lua/fair_abandon.lua
	fairAbandonLua string
	//go:embed lua/semaphore_acquire.lua
	semaphoreAcquireLua string
	//go:embed lua/semaphore_renew.lua
	semaphoreRenewLua string
	//go:embed lua/semaphore_release.lua
	semaphoreReleaseLua string
	//go:embed lua/semaphore_abandon.lua
	semaphoreAbandonLua string

	mutexAcquire     = client.NewScript(mutexAcquireLua)
	mutexRenew       = client.NewScript(mutexRenewLua)
	mutexRelease     = client.NewScript(mutexReleaseLua)
	mutexAbandon     = client.NewScript(mutexAbandonLua)
	fairAcquire      = client.NewScript(fairAcquireLua)
	fairAbandon      = client.NewScript(fairAbandonLua)
	semaphoreAcquire = client.NewScript(semaphoreAcquireLua)
	semaphoreRenew   = client.NewScript(semaphoreRenewLua)
	semaphoreRelease = client.NewScript(semaphoreReleaseLua)
	semaphoreAbandon = client.NewScript(semaphoreAbandonLua)
)
