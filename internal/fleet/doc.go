// Package fleet simulates fleets of up to thousands of processes that use one cache: the library itself, in fake
// time, with a model of the server in between. It has tests only; scripts/scale runs it whole and writes
// docs/scale.md.
package fleet
