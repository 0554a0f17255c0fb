package lock

import (
	"embed"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

//go:embed lua/*.lua
var lua embed.FS

var (
	mutexAcquire     = client.NewTaking(script("mutex_acquire"))
	mutexRenew       = client.NewScript(script("mutex_renew"))
	mutexRelease     = client.NewScript(script("mutex_release"))
	mutexAbandon     = client.NewScript(script("mutex_abandon"))
	fairAcquire      = client.NewTaking(script("fair_acquire"))
	fairRelease      = client.NewScript(script("fair_release"))
	fairAbandon      = client.NewScript(script("fair_abandon"))
	semaphoreAcquire = client.NewTaking(script("semaphore_acquire"))
	semaphoreRenew   = client.NewScript(script("semaphore_renew"))
	semaphoreRelease = client.NewScript(script("semaphore_release"))
	semaphoreAbandon = client.NewScript(script("semaphore_abandon"))
)

// script returns the text of a script, with the functions that all of them share before it.
func script(name string) string {
	text := wake.Lua
	for _, file := range []string{"waiting", "fence", "ended", name} {
		part, err := lua.ReadFile("lua/" + file + ".lua")
		if err != nil {
			panic(err) // the names are those above
		}
		text += string(part)
	}
	return text
}
