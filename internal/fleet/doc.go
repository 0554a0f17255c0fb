// Package fleet simulates fleets of up to thousands of processes that use one cache: the library
// itself runs in fake time, with a model of the server. It has only tests; scripts/scale runs all
// of it and writes docs/scale.md.
package fleet
