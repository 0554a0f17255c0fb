// Command singlefill shows and changes what caches and locks of package singlefill have in Redis.
//
//	singlefill ls users                 # the keys of a namespace
//	singlefill ls                       # the namespaces
//	singlefill get users 42             # an entry: its header in words, its payload as JSON
//	singlefill ttl users 42             # what is left of an entry
//	singlefill del users 42 43          # as Cache.Delete
//	singlefill expire users 42          # as Cache.Expire
//	singlefill clear users              # as Cache.Clear; it asks first
//	singlefill clear -tag eu users      # as Cache.DeleteTag
//	singlefill tags users               # the tags of a namespace, and how many keys each has
//	singlefill locks users              # loads in flight: the fill locks of a namespace
//	singlefill locks                    # locks of package lock, their holders and waiters
//	singlefill version                  # of this command, such as v1.2.3
//
// Flags of a command come behind its name, before or after its arguments; behind -- nothing is a flag. singlefill
// COMMAND -h lists them. All commands but version have these, which may also come before its name:
//
//	-redis URL   the server; default: $REDIS_URL, or redis://127.0.0.1:6379
//	-timeout d   bound on each Redis command; default: 3s
//	-json        one JSON document, with times in RFC 3339 and durations in seconds
//
// # Servers
//
//	redis://user:password@host:6379/0                       a server; rediss:// is TLS, unix:// a socket
//	host:6379                                               the same as redis://host:6379
//	redis://host:6379?addr=host2:6379                       a Cluster; one address is enough, too
//	redis://host:26379?master_name=main&addr=host2:26379    the master that Sentinels name
//
// Other parameters are parameters of go-redis, such as dial_timeout=2s or skip_verify=true.
//
// # What the commands cost
//
// ls and locks find keys by SCAN, on one master after the other, and never by KEYS: they look at
// each key of the server, and hold up no other command for more than a moment. ls reads the first 39
// bytes of each value, get the whole of one. These commands, and ttl, change nothing: a user with the
// rights +@read +info +ping +time is enough, with a Cluster also +@connection +cluster. While ls, locks, tags and clear
// work, they show on stderr how far they are, if that is a terminal.
//
// # What the changes promise
//
// del, expire, clear and clear -tag are the calls of the library, with its promises: a load in flight is not
// stored after them, and processes with Options.Near hear of them. For that they append a record to
// the log of the namespace, whether a process follows it or not; the log expires by itself. Where DeleteTag reads all
// values to find out their tags, clear -tag deletes nothing, and says so: it does not know your Options.Tags.
//
// # Times
//
// Ages are judged by this machine's clock, as a reader of the cache judges them by its own. "Gone in" is
// the server's TTL: the rest of the life and of the stale windows. The time
// since when a lock is held is by the server's clock. Redis knows the holder of a fill lock by a random
// token only. It knows the holder of a lock of package lock also by its lock.Options.Holder. The logs and metrics of
// the processes tell what hits and misses cost: see the modules prometheus and otel.
//
// # Exit status
//
// 0; 1 after an error, which is on stderr; 2 if the command line is wrong. get and ttl exit with 1 if
// there is no entry, and ls if no key matches. del and expire say which keys had no entry, and exit with 0,
// since they have kept loads of them from being stored. Colours are used on a terminal, unless NO_COLOR is set.
package main
