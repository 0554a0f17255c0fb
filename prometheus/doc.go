// Package prometheus exports what caches and locks of package singlefill do as metrics of Prometheus.
//
//	import sfprometheus "github.com/singlefill/singlefill/prometheus"
//
//	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
//	...
//	prometheus.MustRegister(sfprometheus.NewCollector(users, orders))
//
// A hit costs nothing more: a scrape reads its counts from [singlefill.Stats]. Durations come from
// [singlefill.Trace], as loads and waits end.
//
// # Metrics of caches
//
// Each has the label cache, the namespace. Keys are in no label.
//
//	singlefill_gets_total{layer, result}         calls by where they ended: layer near (memory) or redis; result
//	                                             hit, stale (a hit of a stale value) or miss (not in near)
//	singlefill_gets_shared_total                 hits and misses for which another call of the process worked
//	singlefill_stale_served_total{reason}        stale values returned: revalidating, or load_failed
//	singlefill_loads_total{kind, result}         keys loaded: kind call or refresh; result value, not_found, error
//	                                             or panic
//	singlefill_load_duration_seconds{kind}       histogram of calls of a Loader or ManyLoader
//	singlefill_loads_unlocked_total              loads without the fill lock, since Redis did not answer
//	singlefill_loads_unlimited_total             loads that MaxFleetLoads could not limit
//	singlefill_loads_running, _loads_queued      loads now, and those that wait for MaxLoads or MaxFleetLoads
//	singlefill_load_locks_lost_total             fill locks found lost while their load ran
//	singlefill_wait_duration_seconds             histogram of waits for a load in another process
//	singlefill_stores_total{result}              outcomes of loads: stored, fenced (refused, since the key was
//	                                             changed or the lock lost) or error
//	singlefill_redis_errors_total{op}            commands that failed, by purpose: see Trace.RedisError
//	singlefill_redis_refused_total               of these, commands that the server refused
//	singlefill_redis_commands_queued             commands that wait now for a connection of the pool
//	singlefill_breaker_open                      1 while commands are held back; with a Cluster: from any node
//	singlefill_breaker_opened_total              times that this began
//	singlefill_bad_values_total                  stored bytes that could not be decoded
//	singlefill_audits_total{result}              fresh hits that were compared with the source: current, or stale
//	                                             (for more than a second): see Options.Audit
//	singlefill_tag_calls_total                   calls of DeleteTag and ExpireTag
//	singlefill_tag_keys_total                    keys that they found and invalidated
//	singlefill_tag_rebuilds_total                of these calls, those that had to read all values, since what is
//	                                             known of tags may have been lost: often, if Redis evicts it
//	singlefill_tag_clears_total                  of these, those that had to remove all values: Codec or Tags
//	                                             differ from the storing processes'
//	singlefill_near_proof_age_seconds            age of the newest proof that memory is current; absent without one
//	singlefill_near_drops_total                  times that everything in memory was dropped
//
// # Metrics of locks
//
// Lockers are often made for each request, and their names may identify a user: so the label lock is
// chosen by the program, see [Collector.LockTrace].
//
//	singlefill_lock_held                             leases held by this process
//	singlefill_lock_acquired_total                   leases granted
//	singlefill_lock_lost_total                       of these, leases that ended before their release
//	singlefill_lock_expired_total                    leases of other callers that were found to have ended
//	                                                 without a release, for example of killed processes
//	singlefill_lock_wait_duration_seconds{result}    histogram of the calls of Acquire that had to wait: acquired,
//	                                                 busy (ctx ended) or error
//	singlefill_lock_hold_duration_seconds            histogram of the time from a grant to its end
//	singlefill_lock_redis_errors_total{op}           commands that failed: see lock.Trace.RedisError
//
// Histograms have classic buckets and native ones, for servers that take those.
package prometheus
