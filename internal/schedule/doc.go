// Package schedule runs a test under every order in which the commands of several processes can reach Redis: a
// model checker without a model, since what runs is the library itself.
//
// A scenario makes clients, which stand for processes, and actors that use them. It runs in a synctest bubble, on a
// miniredis of its own. Nothing that the clients send arrives by itself: every command waits, and so does every
// reply, until the scheduler picks it. When all goroutines have come to rest the scheduler looks at what waits,
// picks one thing, lets it happen, and so on until the actors are done. Explore runs the scenario again and again,
// all anew, and makes other choices each time, depth first, until there are none left. When a check fails it prints
// what has happened in which order.
//
// Besides commands and replies, the beginning of each actor waits for the scheduler, and what a scenario lets wait,
// such as the end of a load: see World.At. As far as a Plan allows, something may also go wrong in between: a
// connection breaks and the command arrives late, or again; a command is held up until its caller has given up; a
// process is cut off for longer than its locks live; a context is cancelled. Where that makes too many schedules a
// Plan asks for a sample of them.
//
// # Time
//
// Time stands still while anything waits, but for the Pauses of a Plan, and for late commands. Else it passes in
// steps of half a second, and what comes up in a step waits for its end. So the pauses that the library draws by
// lot make no difference while they are shorter than a step, and a schedule can be repeated. Those of a waiter whose
// commands have waited long for the end of their step may be longer. Lives and timeouts should be whole steps, or
// what ends first may be a matter of chance. Runs that are not repeated as they were are counted as lost; more than
// a fifth of them fail the test. The server's clock goes on by a microsecond with each command.
//
// # What is explored once
//
// What a process does next follows from what it has seen: the replies, and when they came. So two schedules have
// come to the same state when each process has seen the same, Redis holds the same, and the same commands are on
// their way. What is behind such a state is explored once; a run that comes to it again is given up. Random tokens
// and the server's times have the names of those who got them first, so that they do not tell states apart.
//
// What a scenario remembers for its checks has to be part of the state, too: it follows from what single processes
// have seen, or is told to World.Note.
package schedule
