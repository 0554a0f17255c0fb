// Package otel gives the caches and locks of package singlefill metrics and spans of OpenTelemetry.
//
//	import sfotel "github.com/singlefill/singlefill/otel"
//
//	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
//	...
//	_, err = sfotel.Instrument(users, nil)
//
// A hit costs nothing more: each collection reads its counts from [singlefill.Stats]. Everything
// else comes from [singlefill.Trace], as loads and waits end.
//
// # Spans
//
// Hits have no spans. The Redis commands can have spans, too: from the instrumentation of the client.
//
//	load NAMESPACE    one call of a Loader or ManyLoader, until its outcomes have been stored, refused
//	                  or given up. Its parent is the span of the call that started the load; that span
//	                  may have ended when a refresh runs in the background. The Loader's context
//	                  carries it, so the spans of the Loader's queries are its children.
//	wait NAMESPACE    a wait for a load in another process; a GetOrLoadMany has one for each key that it
//	                  waits for. Or the wait of a GetOrLoad for a load that another call of this
//	                  process has begun, with a link to the span of that load if this process has
//	                  called its Loader. Its parent is the span of the call that waited.
//	wait LOCK         an Acquire that had to wait: see [LockTrace].
//
// A load has the status Error if a key failed, but not if a key does not exist. Its attributes:
//
//	singlefill.cache              the namespace
//	singlefill.kind               call, or refresh (in the background of a value that could be served)
//	singlefill.load.size          keys
//	singlefill.load.stored        of them, keys whose outcome is in Redis
//	singlefill.load.not_found     keys that do not exist; like the following, absent if it is 0
//	singlefill.load.fenced        keys whose outcome was refused: they were changed, or the lock was lost
//	singlefill.load.store_errors  keys whose outcome could not be stored
//	singlefill.load.unlocked      keys that were loaded without a lock, because Redis did not answer
//	singlefill.load.queued        seconds that it waited for slots of MaxLoads and MaxFleetLoads
//	error.type                    Go type of the first error
//
// A wait has singlefill.cache, and singlefill.wait.for: process or call. One for another process has
// singlefill.wait.polls, the number of commands sent.
//
// # Keys
//
// Keys may be secret, and so may the names of locks and the texts of errors: of a Loader's errors, and
// of the cache's own, some of which name the key. None of them is in a metric, and by default none is
// in a span, where error.type tells the kind of error. [Options.Keys] adds them to spans.
//
// # Metrics of caches
//
// Each has the attribute singlefill.cache, the namespace. If several caches of a process have the same
// namespace, their counts are added. The other attributes are in braces; they have the prefix
// singlefill, too.
//
//	singlefill.gets {layer, result}           calls by where they ended: layer near (memory) or redis; result
//	                                          hit, stale (a hit of a stale value) or miss (not in near)
//	singlefill.gets.shared                    hits and misses for which another call of the process worked
//	singlefill.stale.served {reason}          stale values returned: revalidating, or load_failed
//	singlefill.loads {kind, result}           keys loaded: kind call or refresh; result value, not_found, error
//	                                          or panic
//	singlefill.load.duration {kind}           histogram of calls of a Loader or ManyLoader, in seconds; its
//	                                          exemplars are the spans of loads
//	singlefill.loads.unlocked                 loads without the fill lock, since Redis did not answer
//	singlefill.loads.unlimited                loads that MaxFleetLoads could not limit
//	singlefill.loads.running, .queued         loads now, and those that wait for MaxLoads or MaxFleetLoads
//	singlefill.load.locks_lost                fill locks found lost while their load ran
//	singlefill.wait.duration                  histogram of waits for a load in another process, in seconds
//	singlefill.stores {result}                outcomes of loads: stored, fenced (refused, since the key was
//	                                          changed or the lock lost) or error
//	singlefill.redis.errors {op}              commands that failed, by purpose: see Trace.RedisError
//	singlefill.redis.refused                  of these, commands that the server refused
//	singlefill.redis.commands.queued          commands that wait now for a connection of the pool
//	singlefill.breaker.open                   1 while commands are held back; with a Cluster: from any node
//	singlefill.breaker.opened                 times that this began
//	singlefill.bad_values                     stored bytes that could not be decoded
//	singlefill.audits {result}                fresh hits that were compared with the source: current, or stale
//	                                          (for more than a second): see Options.Audit
//	singlefill.tag.calls                      calls of DeleteTag and ExpireTag
//	singlefill.tag.keys                       keys that they found and invalidated
//	singlefill.tag.rebuilds                   of these calls, those that had to read all values, since what is
//	                                          known of tags may have been lost: often, if Redis evicts it
//	singlefill.tag.clears                     of these, those that had to remove all values: Codec or Tags
//	                                          differ from the storing processes'
//	singlefill.near.proof.age                 age of the newest proof that memory is current, in seconds;
//	                                          absent without one
//	singlefill.near.drops                     times that everything in memory was dropped
//
// # Metrics of locks
//
// Each has the attribute singlefill.lock, which the program chooses: see [LockTrace].
//
//	singlefill.lock.held                      leases held by this process
//	singlefill.lock.acquired                  leases granted
//	singlefill.lock.lost                      of these, leases that ended before their release
//	singlefill.lock.expired                   leases of other callers that were found to have ended without a
//	                                          release, for example of killed processes
//	singlefill.lock.wait.duration {result}    histogram of the calls of Acquire that had to wait, in seconds:
//	                                          acquired, busy (ctx ended) or error
//	singlefill.lock.hold.duration             histogram of the time from a grant to its end, in seconds
//	singlefill.lock.redis.errors {op}         commands that failed: see lock.Trace.RedisError
//
// OpenTelemetry translates these names for Prometheus into the names that the module prometheus
// beside this one uses. The labels differ by the prefix singlefill.
package otel
