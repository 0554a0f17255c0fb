package lock

import (
	"embed"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

//go:embed lua/*.lua
var files embed.FS

var (
	mutexAcquire     = newTaking(lua("mutex_acquire"))
	mutexRenew       = newScript(lua("mutex_renew"))
	mutexRelease     = newScript(lua("mutex_release"))
	mutexAbandon     = newScript(lua("mutex_abandon"))
	fairAcquire      = newTaking(lua("fair_acquire"))
	fairRelease      = newScript(lua("fair_release"))
	fairAbandon      = newScript(lua("fair_abandon"))
	semaphoreAcquire = newTaking(lua("semaphore_acquire"))
	semaphoreRenew   = newScript(lua("semaphore_renew"))
	semaphoreRelease = newScript(lua("semaphore_release"))
	semaphoreAbandon = newScript(lua("semaphore_abandon"))
)

func newScript(text string) client.Script { return client.NewScript(withShared(text)) }

func newTaking(text string) client.Script { return client.NewTaking(withShared(text)) }

// withShared puts the functions that all scripts share before a script.
func withShared(text string) string {
	return wake.Lua + lua("waiting") + lua("fence") + lua("ended") + text
}

func lua(name string) string {
	text, err := files.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(err) // the names are those above
	}
	return string(text)
}
