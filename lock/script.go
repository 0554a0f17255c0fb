package lock

import (
	_ "embed"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

var (
	//go:embed lua/waiting.lua
	waitingLua string
	//go:embed lua/fence.lua
	fenceLua string
	//go:embed lua/ended.lua
	endedLua string
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
	//go:embed lua/fair_release.lua
	fairReleaseLua string
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

	mutexAcquire     = newTaking(mutexAcquireLua)
	mutexRenew       = newScript(mutexRenewLua)
	mutexRelease     = newScript(mutexReleaseLua)
	mutexAbandon     = newScript(mutexAbandonLua)
	fairAcquire      = newTaking(fairAcquireLua)
	fairRelease      = newScript(fairReleaseLua)
	fairAbandon      = newScript(fairAbandonLua)
	semaphoreAcquire = newTaking(semaphoreAcquireLua)
	semaphoreRenew   = newScript(semaphoreRenewLua)
	semaphoreRelease = newScript(semaphoreReleaseLua)
	semaphoreAbandon = newScript(semaphoreAbandonLua)
)

func newScript(text string) client.Script {
	return client.NewScript(wake.Lua + waitingLua + fenceLua + endedLua + text)
}

func newTaking(text string) client.Script {
	return client.NewTaking(wake.Lua + waitingLua + fenceLua + endedLua + text)
}
