package lock

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Every step of every kind may be repeated, may arrive late, and may find what others have left.
//
//fault:any-order
func TestScripts_RepeatedAndLate(t *testing.T) {
	t.Parallel()
	for name, play := range sharedPlays {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []string{"mutex", "fair", "semaphore"} {
				t.Run(kind, func(t *testing.T) {
					_, mini := redistest.StartMini(t)
					for _, rdb := range []redis.UniversalClient{mini, redistest.Shared(t).Client(t)} {
						newStage(t, rdb, kind).run(play)
					}
				})
			}
		})
	}
}

var sharedPlays = map[string]string{
	"taken twice": `
		A takes -> held; A takes -> same; A takes -> same; B takes -> busy`,
	"released twice, and by others": `
		A takes -> held; B releases -> no; B renews -> no; A releases -> yes; A releases -> yes; A renews -> no;
		B releases -> no`,
	"taken again after a release": `
		A takes -> held; A releases -> yes; A takes -> refused; B takes -> held; A takes -> refused;
		A releases -> yes; A renews -> no; B renews -> yes`,
	"a release that is not the holder's": `
		A takes -> held; A releases -> yes; B takes -> held; A releases -> yes; C takes -> busy; B releases -> yes;
		C takes -> held`,
	"abandoned before it arrived": `
		A abandons -> yes; A takes -> refused; A renews -> no; B takes -> held; A takes -> refused;
		A abandons -> yes; B renews -> yes`,
	"abandoned after it arrived": `
		A takes -> held; A abandons -> yes; A abandons -> yes; A takes -> refused; A renews -> no; B takes -> held`,
	"abandoned after a release": `
		A takes -> held; A releases -> yes; A abandons -> yes; A takes -> refused; B takes -> held;
		A abandons -> yes; B renews -> yes`,
	"abandoned by a player without it": `
		A takes -> held; B abandons -> yes; B takes -> refused; A renews -> yes; A releases -> yes;
		B takes -> refused; C takes -> held`,
	"renewed and never brought back": `
		A renews -> no; B takes -> held; A renews -> no; B releases -> yes; B renews -> no; A takes -> held;
		A renews -> yes; A renews -> yes; del lock; A renews -> no; A releases -> no; C takes -> held`,
	"a release that never took it": `
		A releases -> no; A takes -> held; B releases -> no; A takes -> same`,
	"a fence for each grant, and no more": `
		A takes -> held; ttl fence -> 86400; B takes -> busy; B takes -> busy; A renews -> yes; A takes -> same;
		A releases -> yes; B takes -> held; B takes -> same`,
	"the fence is lost, and its holder still holds the lock": `
		A takes -> held; del fence; A takes -> held or same; A takes -> same; B takes -> busy; A releases -> yes;
		del fence; C takes -> held`,
	"the server's clock was put back": `
		future fence; A takes -> held; A releases -> yes; B takes -> held; ttl fence -> 86400`,
	"a foreign text for a fence": `text fence; A takes -> conflict; keys ->`,
}

// The scripts of a fair mutex do what they should, whatever they find.
func TestFairScripts(t *testing.T) { runPlays(t, "fair", fairPlays) }

var fairPlays = map[string]string{
	"a free lock is granted once": `
		A waits -> held; A waits -> same; queue ->; B tries -> busy 0; keys -> lock; ttl lock -> 60`,
	"the order is that of arrival": `
		Z waits -> held; M waits -> busy 0; C waits -> busy 1; X waits -> busy 2; A waits -> busy 3;
		X waits -> busy 2; C waits -> busy 1; queue -> M C X A; alive -> A C M X; Z releases -> yes;
		A waits -> busy 3; X tries -> busy 2; M waits -> held; queue -> C X A; M releases -> yes;
		C waits -> held; C releases -> yes; X waits -> held; X releases -> yes; A waits -> held;
		A releases -> yes; keys ->`,
	"a try does not queue, and overtakes no waiter": `
		A waits -> held; B tries -> busy 0; C waits -> busy 0; B tries -> busy 1; queue -> C; A releases -> yes;
		B tries -> busy 1; B waits -> busy 1; C waits -> held; queue -> B`,
	"a place that is left over from the holder goes": `
		A waits -> held; B waits -> busy 0; place A; queue -> A B; A waits -> same; queue -> B; alive -> B;
		A releases -> yes; B waits -> held`,
	"dead waiters are skipped together": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; D waits -> busy 2; E waits -> busy 3; dead B;
		dead C; dead D; A releases -> yes; E waits -> held; keys -> lock`,
	"each waiter has its own life": `
		A waits -> held; B waits -> busy 0; c waits -> busy 1; lives B -> 60; lives c -> 30; B waits -> busy 0;
		c waits -> busy 1; lives B -> 60; lives c -> 30`,
	"a short life does not shorten those of the keys": `
		A waits -> held; B waits -> busy 0; ttl queue -> 120; ttl alive -> 120; c waits -> busy 1;
		c waits -> busy 1; d waits -> busy 2; ttl queue -> 120; ttl alive -> 120`,
	"the keys live for twice the life of a waiter": `
		A waits -> held; b waits -> busy 0; ttl queue -> 60; ttl alive -> 60; B waits -> busy 1;
		ttl queue -> 120; ttl alive -> 120`,
	"a waiter that asks prolongs its own life only": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; dead C; B waits -> busy 0; queue -> B;
		B tries -> busy 0; lives B -> 60`,
	"an abandoned attempt leaves the queue for good": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; B abandons -> yes; mark B -> there; queue -> C;
		alive -> C; B waits -> refused; B tries -> refused; queue -> C; A releases -> yes; C waits -> held;
		C releases -> yes; keys ->`,
	"an abandoned attempt gives back its grant": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; A releases -> yes; B waits -> held;
		B abandons -> yes; holder ->; queue -> C; B waits -> refused; C waits -> held`,
	"waiters without a life queue again": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; D waits -> busy 2; del alive; C waits -> busy 0;
		queue -> C D; B waits -> busy 2; D waits -> busy 1; queue -> C D B; alive -> B C D; ttl alive -> 120;
		A releases -> yes; C waits -> held; C releases -> yes; D waits -> held; D releases -> yes;
		B waits -> held; keys -> lock`,

	"a lock that is a list is a conflict, and changes nothing": `
		A waits -> held; B waits -> busy 0; list lock; B waits -> conflict; C waits -> conflict;
		C tries -> conflict; A renews -> conflict; A releases -> conflict; queue -> B`,
	"a foreign text with a TTL is waited for": `text lock; A tries -> busy 0; A waits -> busy 0`,
	"an abandon leaves the queue though the lock is a list": `
		A waits -> held; B waits -> busy 0; C waits -> busy 1; list lock; B waits -> conflict; B abandons -> yes;
		queue -> C; alive -> C`,
	"an abandon gives back a grant though the queue is a list": `
		A waits -> held; list queue; A abandons -> yes; holder ->`,
}

// The scripts of a semaphore do what they should, whatever they find.
func TestSemaphoreScripts(t *testing.T) { runPlays(t, "semaphore", semaphorePlays) }

var semaphorePlays = map[string]string{
	"as many as the size, and no more": `
		A takes 3 -> held; B takes 3 -> held; C takes 3 -> held; D takes 3 -> busy; holders -> A B C;
		B releases -> yes; D takes 3 -> held; holders -> A C D; details -> A C D; B releases -> yes;
		holders -> A C D`,
	"dead holders are replaced together": `
		A takes 2 -> held; B takes 2 -> held; dead A; dead B; C takes 2 -> held; D takes 2 -> held;
		E takes 2 -> busy; holders -> C D; details -> C D; A renews -> no; B renews -> no; A releases -> no;
		holders -> C D`,
	"nothing is left of a dead holder beside living ones": `
		A takes 2 -> held; B takes 2 -> held; dead A; C takes 2 -> held; holders -> B C; details -> B C`,
	"each holder has its own life": `
		A takes 3 -> held; b takes 3 -> held; lives A -> 60; lives b -> 30; b renews -> yes; A renews -> yes;
		lives A -> 60; lives b -> 30`,
	"a short life does not shorten that of the keys": `
		A takes 3 -> held; ttl lock -> 75; b takes 3 -> held; b renews -> yes; ttl lock -> 75; ttl details -> 75;
		A releases -> yes; b renews -> yes; ttl lock -> 45; ttl details -> 45`,
	"keys are gone with the last holder": `
		A takes 2 -> held; B takes 2 -> held; A releases -> yes; keys -> lock details; C takes 2 -> held;
		C abandons -> yes; details -> B; B abandons -> yes; keys ->`,
	"another size is refused while there are holders": `
		A takes 2 -> held; B takes 3 -> size 2; B takes 1 -> size 2; B takes 2 -> held; A releases -> yes;
		C takes 3 -> size 2; B releases -> yes; C takes 3 -> held; A takes 2 -> refused; D takes 2 -> size 3`,
	"the largest size counts, whichever came first": `
		A shares 2 -> held; B shares 3 -> held; C shares 2 -> held; D shares 2 -> busy; D shares 3 -> busy;
		holders -> A B C; details -> A B C; A shares 2 -> same; A releases -> yes; D shares 2 -> held;
		E takes 2 -> size 3; E takes 3 -> busy`,
	"the largest size counts for as long as a process uses it": `
		A shares 3 -> held; B shares 2 -> held; C shares 2 -> held; past size; C releases -> yes;
		D shares 2 -> busy; A releases -> yes; D shares 2 -> held; E shares 2 -> busy; E shares 3 -> held;
		F shares 2 -> busy; holders -> B D E`,
	"the largest size of a process that tells no end of it": `
		A takes 3 -> held; B shares 2 -> held; C shares 2 -> held; D shares 2 -> busy; D takes 3 -> busy;
		past size; A releases -> yes; D shares 2 -> busy; B releases -> yes; D shares 2 -> held; holders -> C D`,
	"lost details cost no place, and give none": `
		A takes 2 -> held; B takes 2 -> held; del details; C takes 2 -> busy; A renews -> yes; A releases -> yes;
		C takes 2 -> held; D takes 2 -> busy; holders -> B C`,
	"without details a holder gets a larger fence": `
		A takes 2 -> held; B takes 2 -> held; del details; A takes 2 -> held; A takes 2 -> same; holders -> A B`,
	"an abandoned attempt gives back its place for good": `
		A takes 1 -> held; A abandons -> yes; mark A -> there; keys ->; A takes 1 -> refused; B abandons -> yes;
		B takes 1 -> refused; C takes 1 -> held; A abandons -> yes; holders -> C`,

	"holders that are a list are a conflict, and change nothing": `
		list lock; A takes 2 -> conflict; A renews -> conflict; A releases -> conflict; A abandons -> conflict;
		keys -> lock`,
	"a mutex of the same name is a conflict": `
		text lock; A takes 2 -> conflict; A renews -> conflict; A releases -> conflict`,
	"details that are a list are a conflict with holders": `
		A takes 2 -> held; list details; B takes 2 -> conflict; A renews -> yes; holders -> A`,
	"an abandon gives back its place though the details are a list": `
		A takes 1 -> held; list details; A abandons -> conflict; holders ->`,
	"foreign details are not deleted": `list details; A takes 2 -> conflict; keys -> details`,
}
