// Package bench compares singlefill with what else could do the same work, and with doing it by hand, on one
// redis-server that it starts itself. It is a module of its own, so that nobody who uses singlefill has to
// download what it is compared with.
//
// Run it by scripts/bench, which writes the tables of docs/speed.md. On a machine that does other things too only
// ratios mean anything, and only between measurements that were taken together: see race.
package bench
