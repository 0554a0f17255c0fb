// Package fleetlock lets package singlefill make the semaphore of MaxFleetLoads, whose keys begin with
// the namespace of the cache, so that one ACL pattern admits all keys of a namespace. The keys of
// other locks follow from their names.
package fleetlock

// NewSemaphore is lock.NewSemaphore with the first key of the semaphore, which has a hash tag. While
// processes disagree on the size, the largest one counts:
//
//	func(rdb redis.UniversalClient, name, key string, size int, opts *lock.Options) (*lock.Locker, error)
//
// Package lock sets it. Its type would be an import cycle.
var NewSemaphore any
