//go:build race

package redistest

// Race reports whether the race detector is on. What explores every order takes several times
// as long with it, and a sample shows it as much: scripts/test runs those tests without it, too.
const Race = true
