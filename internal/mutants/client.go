package main

// clientMutants are bugs of the client: of its breakers, and of the queue of commands.
var clientMutants = []mutant{
	// The breaker.
	{
		name: "breaker-stays-open",
		bug:  "The breaker never closes: a server that is back is not used",
		file: "internal/client/breaker.go",
		old:  "n.outage.Store(nil)",
		new:  "",
		pkg:  "internal/client", test: "TestBreaker_Closes",
	},
	{
		name: "volleys-open-the-breaker",
		bug:  "Failures of commands that were sent before the last answer count",
		file: "internal/client/server.go",
		old:  "if at < answered {",
		new:  "if false {",
		pkg:  "internal/client", test: "TestBreaker_VolleyAroundAnAnswer",
	},
	{
		name: "waiting-counts-against-the-server",
		bug:  "The time of a command runs while it waits for a connection",
		file: "internal/client/server.go",
		old:  "return min(time.Since(then), time.Since(s.begun)-time.Duration(s.answered.Load()))",
		new:  "return time.Since(then)",
		pkg:  "internal/client", test: "TestAdmission_Hits",
	},
	{
		name: "impatience-opens-the-breaker",
		bug:  "A caller that leaves counts as a failure of the server",
		file: "internal/client/client.go",
		old:  "context.AfterFunc(bounded, func() { finish(none, bounded.Err()) })",
		new:  "finish(none, context.DeadlineExceeded)",
		pkg:  "internal/client", test: "TestBreaker_ImpatientCallers",
	},
	{
		name: "stale-after-ends-the-load",
		bug:  "A load that waits for a slot is given up when its only caller has taken the old value",
		file: "internal/flight/fills.go",
		old:  "return c.all > 0 || c.kept",
		new:  "return c.all > 0",
		pkg:  "internal/tests/stale", test: "TestStaleAfter_Queue",
	},
	{
		name: "stale-after-per-call",
		bug:  "Each caller of a source that hangs waits for StaleAfter, however long the load has been in flight",
		file: "loader.go",
		old:  "m.Begun.Add(c.opts.staleAfter)",
		new:  "time.Now().Add(c.opts.staleAfter)",
		pkg:  "internal/tests/stale", test: "TestStaleAfter_SlowSource",
	},

	// The gate and the groups.
	{
		name: "together-after-silence",
		bug:  "After a command that was not answered, many callers wait for the next one",
		file: "internal/client/gate.go",
		old:  "g.admit(answered)",
		new:  "g.admit(true)",
		pkg:  "./internal/client", test: "TestTogether_Length",
	},
	{
		name: "together-without-caller",
		bug:  "A command goes although its caller has left before",
		file: "internal/client/together.go",
		old:  "return other == w })",
		new:  "return false })",
		pkg:  "./internal/client", test: "TestTogether_LeavesAsTheyGo",
	},
	{
		name: "together-however-slow",
		bug:  "Groups grow however long they take",
		file: "internal/client/together.go",
		old:  "time.Since(sent) <= timeout/quick",
		new:  "time.Since(sent) <= timeout",
		pkg:  "./internal/client", test: "TestTogether_Length",
	},
	{
		name: "given-up-and-executed",
		bug:  "A command that was given up is sent when the client has a connection",
		file: "internal/client/late.go",
		old:  "if t.caller.left.Load() {",
		new:  "if false {",
		pkg:  "internal/tests/faults/lock", test: "TestAcquire_SlowConnection",
	},
}
