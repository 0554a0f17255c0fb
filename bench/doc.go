// Package bench compares singlefill with alternatives, and with equivalent code written by hand, on
// a redis-server that it starts. The module is separate, so that users of singlefill do not
// download the alternatives.
//
// scripts/bench runs it and writes bench/results. On a machine that is used for other work, only ratios are meaningful,
// and only between measurements of one race.
package bench
