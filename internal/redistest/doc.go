// Package redistest holds what the tests of this module share: Redis servers that belong to one
// test, a proxy that injects faults between a client and its server, and child processes that can
// be killed and frozen.
//
// What a test starts is stopped by t.Cleanup. A test that only reads and writes in its own
// namespace uses the [Shared] server, or runs on every kind of client by [Each]. A test that
// disturbs a server (kill, freeze, flush, configuration, call counts) starts its own with [Start],
// or several with [StartReplica], [StartSentinel], [StartCluster] and [StartReplicatedCluster].
//
// # Faults
//
// A [Server] can be killed, restarted, frozen and thawed; other faults of a server are commands to
// its [Server.Admin]. A [Cluster] can [Move] a slot. A [Process] can be killed and frozen.
//
// A [Proxy] has rules for faults of single commands: [Proxy.On] applies an [Action] to those that
// match, in the direction of the request ([DropRequest], [HoldRequest], [CloseBefore]) or of the reply
// ([DropReply], [MuteReply], [HoldReply], [ResetReply]). Its methods are faults of the whole network:
// Delay, BlackHole, Cut, Refuse, Redirect. A rule for every command is a fault of one direction: with
// MuteReply a server receives but its replies are lost.
//
// Every fault is counted: by [Rule.Fired], by [Proxy.Swallowed], by the result of Cut. A test fails if
// its fault did not happen.
//
// # Leaks
//
// Every package that uses redistest, or whose tests start goroutines, calls [Main] from its
// TestMain. A leak fails the test or the run: a goroutine; a connection to a server that is
// stopped; a key on that server, or of a client of NewLocal, named as this module names keys, without a TTL. A test
// that creates one on purpose declares it with [Planted].
package redistest
