package lock

import (
	_ "embed"

	"github.com/redis/go-redis/v9"
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

	mutexAcquire     = newScript(mutexAcquireLua)
	mutexRenew       = newScript(mutexRenewLua)
	mutexRelease     = newScript(mutexReleaseLua)
	mutexAbandon     = newScript(mutexAbandonLua)
	fairAcquire      = newScript(fairAcquireLua)
	fairAbandon      = newScript(fairAbandonLua)
	semaphoreAcquire = newScript(semaphoreAcquireLua)
	semaphoreRenew   = newScript(semaphoreRenewLua)
	semaphoreRelease = newScript(semaphoreReleaseLua)
	semaphoreAbandon = newScript(semaphoreAbandonLua)
)

// A script is called by its hash, and by its text while the server does not know it. Both are
// strings.
type script struct{ text, hash any }

func newScript(text string) script { return script{text, redis.NewScript(text).Hash()} }
