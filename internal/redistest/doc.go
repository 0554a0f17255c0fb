// Package redistest holds what the tests of this module share: Redis servers
// that belong to one test, a proxy that injects faults between a client and its
// server, and child processes that can be killed and frozen.
//
// A test asks for what it needs and gets it stopped by t.Cleanup. A test that
// only reads and writes under its own namespace takes the [Shared] server, or
// runs on every kind of client by [Each]; a test that disturbs a server (kill,
// freeze, flush, configuration, call counts) starts its own with [Start].
//
// Every package that uses redistest calls [Main] from its TestMain.
package redistest
