package main

// lockMutants are bugs of package lock.
var lockMutants = []mutant{
	// Owners.
	{
		name: "lock-release-any",
		bug:  "Release deletes whatever lease is there: a late one frees the successor's",
		file: "lock/lua/mutex_release.lua",
		old:  "if redis.call('GET', KEYS[1]) == ARGV[1] then",
		new:  "if redis.call('GET', KEYS[1]) then",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "lock-get-then-del",
		bug:  "Release is a GET and then a DEL: in between the lease may end and be another's",
		file: "lock/command.go",
		old:  "return o.runOnLease(ctx, within, \"release\", s, keys, o.markLife().Milliseconds(), maxMarks, o.reservationLife())",
		new: `return client.DoWithin(ctx, o.client, within, "release", o.keys.lock, func(ctx context.Context) (bool, error) {
		holder, err := o.client.Redis.Get(ctx, o.keys.lock).Result()
		if err != nil || len(holder) < len(o.token) || holder[:len(o.token)] != o.token {
			return false, nil
		}
		n, err := o.client.Redis.Del(ctx, o.keys.lock).Result()
		return n == 1, err
	})`,
		pkg: "lock", test: "TestRelease_NilOnce",
	},
	{
		name: "lock-token-per-process",
		bug:  "The token belongs to the process, not to the Acquire: two goroutines hold the lock at once",
		file: "lock/lock.go",
		old:  "token: l.waiters.newToken()})",
		new:  "token: l.waiters.newToken()[:0] + \"AAAAAAAAAAAAAAAAAAAAAAAAAA\"})",
		pkg:  "lock", test: "TestRelease_NilOnce",
	},
	{
		name: "lock-renew-revives",
		bug:  "Renewing is a SET: it brings back a lease that has been lost",
		file: "lock/lua/mutex_renew.lua",
		old:  "if redis.call('GET', KEYS[1]) ~=",
		new:  "redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])\nif redis.call('GET', KEYS[1]) ~=",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "lock-renew-any",
		bug:  "Renewing does not check the holder: it prolongs another holder's lease",
		file: "lock/lua/mutex_renew.lua",
		old:  "if redis.call('GET', KEYS[1]) ~= ARGV[1] then",
		new:  "if not redis.call('GET', KEYS[1]) then",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "semaphore-renew-revives",
		bug:  "Renewing a place in a semaphore adds a holder that has lost it",
		file: "lock/lua/semaphore_renew.lua",
		old:  "if not ends or ends <= ms then\n",
		new:  "ends = ends or 0\nif false then\n",
		pkg:  "lock", test: "TestScripts_RandomSteps/semaphore",
	},

	// Time.
	{
		name: "lock-renew-seconds",
		bug:  "Renewing takes milliseconds for seconds",
		file: "lock/lua/mutex_renew.lua",
		old:  "redis.call('PEXPIRE'",
		new:  "redis.call('EXPIRE'",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "semaphore-score-seconds",
		bug:  "The end of a place is reckoned in seconds and milliseconds at once",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "local ms = math.floor(now / 1000)",
		new:  "local ms = math.floor(now / 1000000)",
		pkg:  "lock", test: "TestScripts_RandomSteps/semaphore",
	},
	{
		name: "semaphore-client-clock",
		bug:  "The ends of places go by the clients' clocks: one that is ahead drops holders that live",
		file: "lock/kinds.go",
		old:  "return o.runAcquire(ctx, within, semaphoreAcquire,",
		new: `now := time.Now()
	text := fmt.Sprintf("local real = redis\n"+
		"local redis = {error_reply = real.error_reply, call = function(name, ...)\n"+
		"  if name == 'TIME' then return {'%d', '%d'} end\n"+
		"  return real.call(name, ...)\n"+
		"end}\n", now.Unix(), now.Nanosecond()/1000)
	return o.runAcquire(ctx, within, newScript(text+semaphoreAcquireLua),`,
		pkg: "lock", test: "TestNewSemaphore_ClientClock",
	},
	{
		name: "lock-life-from-reply",
		bug:  "A lease's life is counted from the reply: a slow one is believed to be held after its end",
		file: "lock/acquire.go",
		old:  "\t\t\treturn &Lease{owner: a.owner, fence: r.number, sentAt: sent}",
		new:  "\t\t\treturn &Lease{owner: a.owner, fence: r.number, sentAt: sent.Add(time.Since(sent))}",
		pkg:  "lock", test: "TestLease_LifeBeginsWhenSent",
	},
	{
		name: "lock-no-margin",
		bug:  "A holder is told of its lease's end when it is over, not before",
		file: "lock/lease.go",
		old:  "return max(ttl/20, 2*time.Millisecond)",
		new:  "return 1",
		pkg:  "lock", test: "TestLease_LostBeforeItsEnd",
	},
	{
		name: "lock-max-hold-ignored",
		bug:  "A lease is renewed for far longer than MaxHold",
		file: "lock/lease.go",
		old:  "MaxHold: opts.MaxHold,",
		new:  "MaxHold: 30 * opts.MaxHold,",
		pkg:  "lock", test: "TestLease_MaxHold/mutex",
	},

	// Places.
	{
		name: "semaphore-count-then-add",
		bug:  "Holders are counted by one command and added by the next: two take the last place",
		file: "lock/kinds.go",
		old:  "return o.runAcquire(ctx, within, semaphoreAcquire, keys, reserved, since, waiting, s.size, largest)",
		new: `n, err := o.client.Redis.ZCard(ctx, o.keys.lock).Result()
	if err != nil || n >= int64(s.size) {
		return reply{state: busy, number: 1}, err
	}
	return o.runAcquire(ctx, within, semaphoreAcquire, keys, reserved, since, waiting, 1<<30, largest)`,
		pkg: "lock", test: "TestNewSemaphore_ManyRounds",
	},
	{
		name: "semaphore-off-by-one",
		bug:  "One more than the semaphore's size may hold it",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "local free = tonumber(places) - taken\n",
		new:  "local free = tonumber(places) - taken + 1\n",
		pkg:  "lock", test: "TestScripts_RandomSteps/semaphore",
	},
	{
		name: "semaphore-counts-the-dead",
		bug:  "Holders whose lease has ended are counted for as long as others hold a place",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', ms))) do",
		new:  "for _, dead in ipairs({}) do",
		pkg:  "lock", test: "TestSemaphoreScripts",
	},

	{
		name: "fleet-loads-smaller-limit",
		bug:  "The smaller MaxFleetLoads bounds its processes, so that those with the larger one keep all places",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "then places = size else",
		new:  "then places = places else",
		pkg:  "lock", test: "TestSemaphoreScripts",
	},
	{
		name: "fleet-loads-larger-for-ever",
		bug:  "A larger MaxFleetLoads counts while loads run, although no process has it any more",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "if larger and sizeUntil > ms",
		new:  "if larger",
		pkg:  "lock", test: "TestSemaphoreScripts",
	},

	// A TTL on every key.
	{
		name: "mutex-forever",
		bug:  "A mutex is taken without a TTL: a dead holder blocks it for good",
		file: "lock/lua/mutex_acquire.lua",
		old:  "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])",
		new:  "redis.call('SET', KEYS[1], ARGV[1])",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "fair-mutex-forever",
		bug:  "A fair mutex is taken without a TTL",
		file: "lock/lua/fair_acquire.lua",
		old:  "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])",
		new:  "redis.call('SET', KEYS[1], ARGV[1])",
		pkg:  "lock", test: "TestScripts_RandomSteps/fair",
	},
	{
		name: "semaphore-forever",
		bug:  "The set of holders has no TTL",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "redis.call('PEXPIREAT', KEYS[1], ends)\n",
		new:  "",
		pkg:  "lock", test: "TestScripts_RepeatedAndLate/taken_twice/semaphore",
	},
	{
		name: "details-forever",
		bug:  "What is known of the holders has no TTL",
		file: "lock/lua/semaphore_acquire.lua",
		old:  "end\nredis.call('PEXPIREAT', KEYS[6], ends)\n",
		new:  "end\n",
		pkg:  "lock", test: "TestScripts_RepeatedAndLate/taken_twice/semaphore",
	},
	{
		name: "fence-forever",
		bug:  "The last fence has no TTL: each name leaves a key for good",
		file: "lock/lua/mutex_acquire.lua",
		old:  "fence), 'PX', ARGV[3])",
		new:  "fence))",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "released-forever",
		bug:  "The marks of releases have no TTL: each name leaves a key for good",
		file: "lock/lua/ended.lua",
		old:  "  if short then redis.call('PEXPIRE', ended, life) end\n  local half",
		new:  "  local half",
		pkg:  "lock", test: "TestScripts_RepeatedAndLate/released_twice,_and_by_others/mutex",
	},
	{
		name: "abandoned-forever",
		bug:  "The marks of abandoned attempts have no TTL",
		file: "lock/lua/ended.lua",
		old:  "redis.call('PTTL', ended) < tonumber(life)",
		new:  "false",
		pkg:  "lock", test: "TestScripts_RepeatedAndLate/abandoned_before_it_arrived/mutex",
	},
	{
		name: "queue-forever",
		bug:  "The queue of a fair mutex has no TTL",
		file: "lock/lua/fair_acquire.lua",
		old:  "if redis.call('PTTL', key) < 2",
		new:  "if key ~= KEYS[4] and redis.call('PTTL', key) < 2",
		pkg:  "lock", test: "TestAcquire_AllDie/fair",
	},
	{
		name: "alive-forever",
		bug:  "The times until which waiters are alive have no TTL",
		file: "lock/lua/fair_acquire.lua",
		old:  "if redis.call('PTTL', key) < 2",
		new:  "if key ~= KEYS[5] and redis.call('PTTL', key) < 2",
		pkg:  "lock", test: "TestAcquire_AllDie/fair",
	},

	// Commands that are lost, repeated and late.
	{
		name: "tombstone-unwritten",
		bug:  "Giving up an attempt leaves no mark: a late command takes the lock although no caller waits",
		file: "lock/lua/mutex_abandon.lua",
		old:  "mark(redis.call, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3])\n",
		new:  "",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "tombstone-unread",
		bug:  "The mark of an attempt that has ended is not looked for when its command arrives",
		file: "lock/lua/mutex_acquire.lua",
		old:  "if ended and tonumber(ended) > ms then",
		new:  "if false then",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "release-not-repeatable",
		bug:  "A release leaves no mark: when its reply is lost, the next try calls it a loss",
		file: "lock/lua/mutex_release.lua",
		old:  "pcall(mark, redis.call, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3])",
		new:  "",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "acquire-not-repeatable",
		bug:  "Asking again with the same token says busy: a caller whose reply was lost is locked out by its own lease",
		file: "lock/lua/mutex_acquire.lua",
		old:  "local ours = holder == ARGV[1]",
		new:  "local ours = false",
		pkg:  "lock", test: "TestScripts_RandomSteps/mutex",
	},
	{
		name: "client-retries",
		bug:  "The client may repeat a command by itself: its last error hides a grant whose reply was lost",
		file: "lock/command.go",
		old:  "NoRetry() bool { return true }",
		new:  "NoRetry() bool { return false }",
		pkg:  "internal/tests/faults/lock", test: "TestErrAmbiguous_LostReplyThenRefused/mutex",
	},
	{
		name: "lost-lease-not-given-back",
		bug:  "A lease lost for want of an answer is not given back, though its renewal may have arrived",
		file: "lock/lease.go",
		old:  "if why != renew.ErrGone {",
		new:  "if false {",
		pkg:  "lock", test: "TestLease_LostUnanswered",
	},
	{
		name: "clean-ups-without-limit",
		bug:  "At a server that does not answer each call leaves a goroutine that tries to clean up",
		file: "lock/cleanup.go",
		old:  "const maxWorkers = 8",
		new:  "const maxWorkers = 1 << 30",
		pkg:  "lock", test: "TestCleanup_FewCommands",
	},

	// The fence.
	{
		name: "fence-by-clock-alone",
		bug:  "The fence is the server's clock and nothing else: it stands still, or goes back with it",
		file: "lock/lua/mutex_acquire.lua",
		old:  "math.max(last + 1, now)",
		new:  "now",
		pkg:  "lock", test: "TestFence_Grows/mutex",
	},
	{
		name: "fence-by-counter-alone",
		bug:  "The fence is a counter and nothing else: it begins at 1 again when Redis has lost it",
		file: "lock/lua/mutex_acquire.lua",
		old:  "math.max(last + 1, now)",
		new:  "last + 1",
		pkg:  "lock", test: "TestFence_Grows/mutex",
	},

	// Release and Do.
	{
		name: "release-by-the-request",
		bug:  "Release goes by the context of the request: when that has ended, nothing is released",
		file: "lock/lease.go",
		old:  "ctx = client.Detach(ctx)",
		new:  "_ = client.Detach",
		pkg:  "lock", test: "TestRelease_NilOnce",
	},
	{
		name: "lease-ends-with-the-request",
		bug:  "The lease is renewed on the context of Acquire: it is lost when that ends",
		file: "lock/lease.go",
		old:  "ctx = context.WithoutCancel(ctx)",
		new:  "",
		pkg:  "lock", test: "TestLease_ContextOfAcquire",
	},
	{
		name: "do-keeps-the-lease-of-a-panic",
		bug:  "Do releases only when its function returns or fails, not when it panics",
		file: "lock/lock.go",
		old:  "failed := lease.Release(ctx)",
		new:  "if p := recover(); p != nil {\n\t\t\tpanic(p)\n\t\t}\n\t\tfailed := lease.Release(ctx)",
		pkg:  "lock", test: "TestDo_Panic/mutex", hangs: true,
	},
	{
		name: "do-hides-the-error",
		bug:  "An error of Release takes the place of the error of Do's function",
		file: "lock/lock.go",
		old:  "case err != nil || failed == nil:",
		new:  "case failed == nil:",
		pkg:  "lock", test: "TestDo_ReleaseFails/mutex",
	},
}
