package lock

import (
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The scripts of a fair mutex do what they should, whatever they find.
func TestFairScripts(t *testing.T) {
	redistest.Planted(t, "a_lock_without_a_TTL_is_a_conflict")
	runPlays(t, true, fairPlays)
}

var fairPlays = map[string]string{
	"a free lock is granted once": `
		A waits -> held
		A waits -> same
		queue ->
		B tries -> busy 0
		keys -> lock
		ttl lock -> 60`,
	"the order is that of arrival": `
		Z waits -> held
		M waits -> busy 0
		C waits -> busy 1
		X waits -> busy 2
		A waits -> busy 3
		X waits -> busy 2
		C waits -> busy 1
		queue -> M C X A
		alive -> A C M X
		Z releases -> yes
		A waits -> busy 3
		X tries -> busy 2
		M waits -> held
		queue -> C X A
		M releases -> yes
		C waits -> held
		C releases -> yes
		X waits -> held
		X releases -> yes
		A waits -> held
		A releases -> yes
		keys ->`,
	"a try does not queue, and overtakes no waiter": `
		A waits -> held
		B tries -> busy 0
		C waits -> busy 0
		B tries -> busy 1
		queue -> C
		A releases -> yes
		B tries -> busy 1
		B waits -> busy 1
		C waits -> held
		queue -> B`,
	"a holder whose reply was lost is not in the queue": `
		A waits -> held
		B waits -> busy 0
		A waits -> same
		A tries -> same
		queue -> B
		A releases -> yes
		B waits -> held`,
	"a place that is left over from the holder goes": `
		A waits -> held
		B waits -> busy 0
		place A
		queue -> A B
		A waits -> same
		queue -> B
		alive -> B
		A releases -> yes
		B waits -> held`,
	"dead waiters are skipped together": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		D waits -> busy 2
		E waits -> busy 3
		dead B
		dead C
		dead D
		A releases -> yes
		E waits -> held
		keys -> lock`,
	"a try skips dead waiters, too": `
		A waits -> held
		B waits -> busy 0
		dead B
		A releases -> yes
		C tries -> held`,
	"a late waiter keeps its place until others ask": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		dead B
		B waits -> busy 0
		lives B -> 60
		queue -> B C`,
	"a late waiter is the last after others have asked": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		dead B
		C waits -> busy 0
		queue -> C
		B waits -> busy 1
		B waits -> busy 1
		queue -> C B`,
	"each waiter has its own life": `
		A waits -> held
		B waits -> busy 0
		c waits -> busy 1
		lives B -> 60
		lives c -> 30
		B waits -> busy 0
		c waits -> busy 1
		lives B -> 60
		lives c -> 30`,
	"a short life does not shorten those of the keys": `
		A waits -> held
		B waits -> busy 0
		ttl queue -> 120
		ttl alive -> 120
		c waits -> busy 1
		c waits -> busy 1
		d waits -> busy 2
		ttl queue -> 120
		ttl alive -> 120`,
	"the keys live for twice the life of a waiter": `
		A waits -> held
		b waits -> busy 0
		ttl queue -> 60
		ttl alive -> 60
		B waits -> busy 1
		ttl queue -> 120
		ttl alive -> 120`,
	"a waiter that asks prolongs its own life only": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		dead C
		B waits -> busy 0
		queue -> B
		B tries -> busy 0
		lives B -> 60`,
	"the fence lives for a day": `
		A waits -> held
		ttl fence -> 86400`,
	"an abandoned attempt leaves the queue for good": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		B abandons -> yes
		mark B -> there
		queue -> C
		alive -> C
		B waits -> refused
		B tries -> refused
		queue -> C
		A releases -> yes
		C waits -> held
		C releases -> yes
		keys ->`,
	"an abandoned attempt gives back its grant": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		A releases -> yes
		B waits -> held
		B abandons -> yes
		holder ->
		queue -> C
		B waits -> refused
		C waits -> held`,
	"an acquire after its abandon takes nothing": `
		A abandons -> yes
		A abandons -> yes
		A waits -> refused
		A tries -> refused
		keys ->`,
	"an abandon takes nothing from others": `
		A waits -> held
		B waits -> busy 0
		C abandons -> yes
		holder -> A
		queue -> B
		alive -> B`,
	"a late command after a release takes nothing": `
		A waits -> held
		B waits -> busy 0
		A releases -> yes
		A waits -> refused
		A tries -> refused
		queue -> B
		B waits -> held
		A waits -> refused
		A releases -> yes
		A renews -> no
		holder -> B`,
	"only the holder releases and renews": `
		A waits -> held
		B releases -> no
		B renews -> no
		C waits -> busy 0
		C releases -> no
		C renews -> no
		holder -> A
		queue -> C
		ttl lock -> 60`,
	"a renewal brings no lost lease back": `
		A waits -> held
		A renews -> yes
		ttl lock -> 60
		del lock
		A renews -> no
		holder ->`,
	"a lost lock goes to the next waiter": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		del lock
		C waits -> busy 1
		B waits -> held
		A releases -> no
		A renews -> no
		holder -> B`,
	"a lost queue forms again": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		del queue
		C waits -> busy 0
		B waits -> busy 1
		A releases -> yes
		B waits -> busy 1
		C waits -> held
		C releases -> yes
		B waits -> held
		keys -> lock`,
	"a lost queue does not block a free lock": `
		A waits -> held
		B waits -> busy 0
		A releases -> yes
		del queue
		C tries -> held
		B waits -> busy 0`,
	"waiters without a life queue again": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		D waits -> busy 2
		del alive
		C waits -> busy 0
		queue -> C D
		B waits -> busy 2
		D waits -> busy 1
		queue -> C D B
		alive -> B C D
		ttl alive -> 120
		A releases -> yes
		C waits -> held
		C releases -> yes
		D waits -> held
		D releases -> yes
		B waits -> held
		keys -> lock`,
	"without lives and lock the first to ask gets it": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		del alive
		del lock
		C waits -> held
		keys -> lock`,
	"the fence grows though the server's clock was put back": `
		future fence
		A waits -> held
		A releases -> yes
		B waits -> held
		ttl fence -> 86400`,
	"the fence grows though its key is lost": `
		A waits -> held
		A releases -> yes
		del fence
		B waits -> held`,
	"without its fence a holder gets a larger one": `
		A waits -> held
		B waits -> busy 0
		del fence
		A tries -> held
		A waits -> same
		holder -> A
		queue -> B`,

	"a lock that is a list is a conflict, and changes nothing": `
		A waits -> held
		B waits -> busy 0
		list lock
		B waits -> conflict
		C waits -> conflict
		C tries -> conflict
		A renews -> conflict
		A releases -> conflict
		queue -> B`,
	"a lock without a TTL is a conflict": `
		immortal lock
		A waits -> conflict
		A tries -> conflict
		keys -> lock`,
	"a foreign text with a TTL is waited for": `
		text lock
		A tries -> busy 0
		A waits -> busy 0`,
	"a queue that is a list is a conflict, and takes nothing": `
		list queue
		A waits -> conflict
		A tries -> conflict
		holder ->`,
	"an alive key that is a list is a conflict, and takes nothing": `
		list alive
		A waits -> conflict
		A tries -> conflict
		holder ->
		queue ->`,
	"a fence that is a list is a conflict, and takes nothing": `
		list fence
		A waits -> conflict
		holder ->`,
	"a fence that is a foreign text is a conflict": `
		text fence
		A waits -> conflict
		holder ->`,
	"an abandon leaves the queue though the lock is a list": `
		A waits -> held
		B waits -> busy 0
		C waits -> busy 1
		list lock
		B waits -> conflict
		B abandons -> yes
		queue -> C
		alive -> C`,
	"an abandon gives back a grant though the queue is a list": `
		A waits -> held
		list queue
		A abandons -> yes
		holder ->`,
}
