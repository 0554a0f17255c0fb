// Package schedule runs a test under every order in which the commands of several processes can
// reach Redis. It is a model checker without a model: the library itself runs.
//
// A scenario creates clients, which stand for processes, and actors that use them. It runs in a
// synctest bubble, on its own miniredis. Every command and every reply waits until the scheduler
// picks it. When all goroutines are blocked, the scheduler picks one of the waiting items, lets it
// happen, and so on until the actors are done. Explore repeats the scenario from the start and
// makes other choices each time, depth first, until there are none left. When a check fails, it
// prints what happened, in order.
//
// The beginning of each actor waits for the scheduler, too, and also other points of a scenario,
// such as the end of a load: see World.At. If there are too many schedules, a Plan explores a sample
// of them. Nothing fails: what holds under faults, the histories show.
//
// # Time
//
// Time stands still while an item waits. Otherwise it passes in steps of half a second, and what
// becomes due in a step waits for its end. So the random pauses of the library make no difference
// while they are shorter than a step, and a schedule can be repeated. The pauses of a waiter may be
// longer if its commands have waited long for the end of their step. Processes do not listen for
// wake-ups, which would make them poll at other times.
//
// TTLs and timeouts should be whole steps, or chance may decide which ends first. Runs that do not
// repeat are counted as lost; if more than a fifth are lost, the test fails. The server's clock
// advances by a microsecond with each command.
//
// # States
//
// The next step of a process depends on what it saw: the replies, and when they came. So two
// schedules have reached the same state when each process has seen the same, Redis holds the same,
// and the same commands are in transit. What follows a state is explored once; a run that reaches a
// known state ends. Random tokens and the server's times are replaced by the name of the process
// that first got them, so that they do not make states different.
//
// If the checks of a scenario depend on something else, it has to be part of the state, too: it
// must follow from what single processes have seen, or be passed to World.Note.
package schedule
