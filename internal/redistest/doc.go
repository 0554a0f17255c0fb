// Package redistest holds what the tests of this module share: Redis servers
// that belong to one test, a proxy that injects faults between a client and its
// server, and child processes that can be killed and frozen.
//
// A test asks for what it needs and gets it stopped by t.Cleanup. A test that
// only reads and writes under its own namespace takes the [Shared] server, or
// runs on every kind of client by [Each]; a test that disturbs a server (kill,
// freeze, flush, configuration, call counts) starts its own with [Start], or
// several with [StartReplica], [StartSentinel], [StartCluster] and
// [StartReplicatedCluster].
//
// # Faults
//
// A [Server] can be killed, restarted, frozen and thawed; other faults of a server
// are commands to its [Server.Admin]. A [Cluster] can have a slot on the [Move].
// A [Process] can be killed and frozen.
//
// A [Proxy] has faults of single commands, which are rules: [Proxy.On] applies an
// [Action] to those that match, in the direction of the request ([DropRequest],
// [HoldRequest], [CloseBefore], [Twice]) or of the reply ([DropReply], [MuteReply],
// [HoldReply], [ResetReply]). Faults of the whole network are its methods: Delay,
// Trickle, BlackHole, Cut, Refuse, Redirect. With [Any] a rule makes a fault of one
// direction: MuteReply is a server that hears and is not heard.
//
// Every fault is counted: [Rule.Fired], [Proxy.Counts], what Cut returns. A test
// fails if its fault has not come about.
//
// # Leaks
//
// Every package that uses redistest, or whose tests start goroutines, calls [Main]
// from its TestMain. What is left behind fails a test, or the run: a goroutine; a
// connection to a server that is being stopped; a key on it, of the names that
// this module gives, without a TTL. A test that puts such a key there itself says
// so by [Planted].
package redistest
