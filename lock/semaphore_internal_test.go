package lock

import (
	"testing"
)

// The scripts of a semaphore do what they should, whatever they find.
func TestSemaphoreScripts(t *testing.T) { runPlays(t, false, semaphorePlays) }

var semaphorePlays = map[string]string{
	"as many as the size, and no more": `
		A takes 3 -> held
		B takes 3 -> held
		C takes 3 -> held
		D takes 3 -> busy
		holders -> A B C
		B releases -> yes
		D takes 3 -> held
		holders -> A C D
		details -> A C D
		B releases -> yes
		holders -> A C D`,
	"a lost reply takes no second place": `
		A takes 2 -> held
		A takes 2 -> same
		A takes 2 -> same
		B takes 2 -> held
		A takes 2 -> same
		C takes 2 -> busy
		holders -> A B`,
	"one place is a mutex": `
		A takes 1 -> held
		B takes 1 -> busy
		A releases -> yes
		B takes 1 -> held
		A renews -> no
		A releases -> yes
		holders -> B`,
	"dead holders are replaced together": `
		A takes 2 -> held
		B takes 2 -> held
		dead A
		dead B
		C takes 2 -> held
		D takes 2 -> held
		E takes 2 -> busy
		holders -> C D
		details -> C D
		A renews -> no
		B renews -> no
		A releases -> no
		holders -> C D`,
	"nothing is left of a dead holder beside living ones": `
		A takes 2 -> held
		B takes 2 -> held
		dead A
		C takes 2 -> held
		holders -> B C
		details -> B C`,
	"renewing brings no lost lease back": `
		A takes 1 -> held
		dead A
		A renews -> no
		A releases -> no
		keys ->
		B takes 1 -> held
		del lock
		B renews -> no
		keys -> details
		C takes 1 -> held`,
	"each holder has its own life": `
		A takes 3 -> held
		b takes 3 -> held
		lives A -> 60
		lives b -> 30
		b renews -> yes
		A renews -> yes
		lives A -> 60
		lives b -> 30`,
	"a short life does not shorten that of the keys": `
		A takes 3 -> held
		ttl lock -> 75
		b takes 3 -> held
		b renews -> yes
		ttl lock -> 75
		ttl details -> 75
		A releases -> yes
		b renews -> yes
		ttl lock -> 45
		ttl details -> 45`,
	"keys are gone with the last holder": `
		A takes 2 -> held
		B takes 2 -> held
		A releases -> yes
		keys -> lock details
		C takes 2 -> held
		C abandons -> yes
		details -> B
		B abandons -> yes
		keys ->`,
	"another size is refused while there are holders": `
		A takes 2 -> held
		B takes 3 -> size 2
		B takes 1 -> size 2
		B takes 2 -> held
		A releases -> yes
		C takes 3 -> size 2
		B releases -> yes
		C takes 3 -> held
		A takes 2 -> refused
		D takes 2 -> size 3`,
	"the largest size counts, whichever came first": `
		A shares 2 -> held
		B shares 3 -> held
		C shares 2 -> held
		D shares 2 -> busy
		D shares 3 -> busy
		holders -> A B C
		details -> A B C
		A shares 2 -> same
		A releases -> yes
		D shares 2 -> held
		E takes 2 -> size 3
		E takes 3 -> busy`,
	"the largest size counts for as long as a process uses it": `
		A shares 3 -> held
		B shares 2 -> held
		C shares 2 -> held
		past size
		C releases -> yes
		D shares 2 -> busy
		A releases -> yes
		D shares 2 -> held
		E shares 2 -> busy
		E shares 3 -> held
		F shares 2 -> busy
		holders -> B D E`,
	"the largest size of a process that tells no end of it": `
		A takes 3 -> held
		B shares 2 -> held
		C shares 2 -> held
		D shares 2 -> busy
		D takes 3 -> busy
		past size
		A releases -> yes
		D shares 2 -> busy
		B releases -> yes
		D shares 2 -> held
		holders -> C D`,
	"another size works when the holders have died": `
		A takes 2 -> held
		dead A
		B takes 1 -> held
		C takes 2 -> size 1`,
	"another size works when the holders are lost": `
		A takes 2 -> held
		del lock
		B takes 1 -> held
		C takes 1 -> busy
		C takes 2 -> size 1`,
	"lost details cost no place, and give none": `
		A takes 2 -> held
		B takes 2 -> held
		del details
		C takes 2 -> busy
		A renews -> yes
		A releases -> yes
		C takes 2 -> held
		D takes 2 -> busy
		holders -> B C`,
	"without details a holder gets a larger fence": `
		A takes 2 -> held
		B takes 2 -> held
		del details
		A takes 2 -> held
		A takes 2 -> same
		holders -> A B`,
	"an abandoned attempt gives back its place for good": `
		A takes 1 -> held
		A abandons -> yes
		mark A -> there
		keys ->
		A takes 1 -> refused
		B abandons -> yes
		B takes 1 -> refused
		C takes 1 -> held
		A abandons -> yes
		holders -> C`,
	"a late command after a release takes nothing": `
		A takes 1 -> held
		A releases -> yes
		A takes 1 -> refused
		B takes 1 -> held
		A takes 1 -> refused
		A releases -> yes
		holders -> B`,
	"only the holder releases and renews": `
		A takes 2 -> held
		B releases -> no
		B renews -> no
		holders -> A
		lives A -> 60`,
	"the fence grows though the server's clock was put back": `
		future fence
		A takes 2 -> held
		B takes 2 -> held
		ttl fence -> 86400`,
	"the fence lives for a day, and grows though it is lost": `
		A takes 2 -> held
		ttl fence -> 86400
		del fence
		B takes 2 -> held`,

	"holders that are a list are a conflict, and change nothing": `
		list lock
		A takes 2 -> conflict
		A renews -> conflict
		A releases -> conflict
		A abandons -> conflict
		keys -> lock`,
	"a mutex of the same name is a conflict": `
		text lock
		A takes 2 -> conflict
		A renews -> conflict
		A releases -> conflict`,
	"a fence that is a list is a conflict, and takes nothing": `
		list fence
		A takes 2 -> conflict
		keys ->`,
	"a fence that is a foreign text is a conflict": `
		text fence
		A takes 2 -> conflict
		keys ->`,
	"details that are a list are a conflict with holders": `
		A takes 2 -> held
		list details
		B takes 2 -> conflict
		A renews -> yes
		holders -> A`,
	"an abandon gives back its place though the details are a list": `
		A takes 1 -> held
		list details
		A abandons -> conflict
		holders ->`,
	"foreign details are not deleted": `
		list details
		A takes 2 -> conflict
		keys -> details`,
}
