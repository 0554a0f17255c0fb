package main

// nearMutants are bugs of Near: each breaks one rule of its protocol.
var nearMutants = []mutant{
	// Values in transit.
	{
		name: "near-generation-after-read",
		bug:  "The generation is taken after the read: memory keeps a value that was deleted while it was in transit",
		file: "loader.go",
		old:  "\tg := c.generation(valueKey)\n\tdata, asked, err := c.client.Get(ctx, time.Now(), valueKey)\n",
		new:  "\tdata, asked, err := c.client.Get(ctx, time.Now(), valueKey)\n\tg := c.generation(valueKey)\n",
		pkg:  ".", test: "TestNearRules_InTransit/read",
	},
	{
		name: "near-generation-after-lock",
		bug:  "The generation of a value that was found while locking is taken after the reply",
		file: "lock.go",
		old:  "\t\tx.keep(x.fill.Key, g, x.old)\n",
		new:  "\t\tg = x.generation(x.lock.ValueKey())\n\t\tx.keep(x.fill.Key, g, x.old)\n",
		pkg:  ".", test: "TestNearRules_InTransit/locked",
	},
	{
		name: "near-generation-after-store",
		bug:  "The generation of a loaded value is taken after it was stored",
		file: "lock.go",
		old:  "\t\t\tx.keepLoaded(x.fill.Key, g, &o)\n",
		new:  "\t\t\tg = x.generation(x.lock.ValueKey())\n\t\t\tx.keepLoaded(x.fill.Key, g, &o)\n",
		pkg:  ".", test: "TestNearRules_InTransit/stored",
	},

	// The log.
	{
		name: "near-log-read-exclusively",
		bug:  "The log is read behind the last known record, without that one: nothing tells that records are lost",
		file: "internal/near/log.go",
		old:  "len(r.records) > 0 && positionOf(r.records[0]) == from {",
		new:  "true {\n\t\t\t\tif len(r.records) == 0 || positionOf(r.records[0]) != from {\n\t\t\t\t\tr.records = append([]redis.XMessage{{ID: from.id, Values: map[string]any{from.name: \"\"}}}, r.records...)\n\t\t\t\t}\n",
		pkg:  "internal/near", test: "TestTier_RecordsLost/removed",
	},
	{
		name: "near-position-missing",
		bug:  "The first record is taken for the last known one, which is gone",
		file: "internal/near/log.go",
		old:  "len(r.records) > 0 && positionOf(r.records[0]) == from {",
		new:  "len(r.records) > 0 {",
		pkg:  "internal/near", test: "TestTier_RecordsLost/trimmed",
	},
	{
		name: "near-position-by-id",
		bug:  "A record is known by its ID alone, which a server that has lost the newest ones gives again",
		file: "internal/near/log.go",
		old:  "positionOf(r.records[0]) == from {",
		new:  "positionOf(r.records[0]).id == from.id {",
		pkg:  "internal/near", test: "TestTier_RecordsLost/the_ID_given_again",
	},
	{
		name: "near-drop-keeps-generations",
		bug:  "When records are lost, memory is emptied, but what is in transit is kept",
		file: "internal/near/tier.go",
		old:  "\tfor i := range t.stripes {\n\t\tt.stripes[i].Add(1)\n\t}\n",
		new:  "",
		pkg:  "internal/near", test: "TestTier_RecordsLost/removed",
	},

	// The proof.
	{
		name: "near-proof-from-the-reply",
		bug:  "The age of a proof counts from its reply",
		file: "internal/near/tier.go",
		old:  "t.proof.Store(int64(t.At(news.sent)))",
		new:  "t.proof.Store(int64(t.At(time.Now())))",
		pkg:  "internal/near", test: "TestTier_AgeOfTheProof",
	},
	{
		name: "near-proof-before-generations",
		bug:  "The proof is noted before the generations change: for a moment old values are proven",
		file: "internal/near/tier.go",
		old:  "\t\tif news.lost {\n\t\t\tt.drop()\n\t\t}\n",
		new:  "\t\tif !news.more {\n\t\t\tt.proof.Store(int64(t.At(news.sent)))\n\t\t}\n\t\tif news.lost {\n\t\t\tt.drop()\n\t\t}\n",
		pkg:  "internal/near", test: "TestTier_GenerationsBeforeProof",
	},
	{
		name: "near-without-proof",
		bug:  "Memory is served without a proof that it is current",
		file: "near.go",
		old:  "if !ok || !proven || now >= n.staleEnd {",
		new:  "if !ok || proven && false || now >= n.staleEnd {",
		pkg:  ".", test: "TestNearRules_NoProof",
	},

	// Invalidations.
	{
		name: "near-own-invalidation",
		bug:  "A process serves what it has itself deleted until it reads the log",
		file: "cache.go",
		old:  "\t\t\tc.near.Forget(c.valueKey(key))\n",
		new:  "",
		pkg:  ".", test: "TestNearRules_OwnInvalidation",
	},
	{
		name: "near-record-goes-along",
		bug:  "With several servers the record goes with the commands that delete, and may be read before them",
		file: "internal/near/log.go",
		old:  "_, one := l.client.Redis.(*redis.Client)\n",
		new:  "one := true\n",
		pkg:  ".", test: "TestNearRules_OtherProcess/Delete_by_servers",
	},
	{
		name: "near-record-first",
		bug:  "The record of an Expire is appended before the command: who reads it can read the old value after it",
		file: "cache.go",
		old:  "return c.notified(ctx, notice{}, pairs, filllock.Expire(ctx, c.client, pairs))",
		new:  "return errors.Join(c.notified(ctx, notice{}, pairs, nil), filllock.Expire(ctx, c.client, pairs))",
		pkg:  ".", test: "TestNearRules_OtherProcess/Expire",
	},
	{
		name: "near-set-without-record",
		bug:  "Set tells no other process",
		file: "cache.go",
		old:  "return c.notified(ctx, notice{}, []filllock.Pair{s.Pair}, err)",
		new:  "return err",
		pkg:  ".", test: "TestNearRules_OtherProcess/Set",
	},
	{
		name: "near-expire-without-record",
		bug:  "Expire tells no other process",
		file: "cache.go",
		old:  "return c.notified(ctx, notice{}, pairs, filllock.Expire(ctx, c.client, pairs))",
		new:  "return filllock.Expire(ctx, c.client, pairs)",
		pkg:  ".", test: "TestNearRules_OtherProcess/Expire",
	},
	{
		name: "near-refusal-ignored",
		bug:  "The server refuses the record that goes with a Delete, and Delete returns as if it were there",
		file: "near.go",
		old:  "err = c.near.Reset(ctx)",
		new:  "err = nil",
		pkg:  ".", test: "TestNearRules_OtherProcess/Delete,_record_refused",
	},
	{
		name: "near-refusal-behind-ignored",
		bug:  "The server refuses the record that follows a Set, and Set returns as if it were there",
		file: "internal/near/log.go",
		old:  "err = l.Reset(ctx)",
		new:  "err = nil",
		pkg:  ".", test: "TestNearRules_OtherProcess/Set,_record_refused",
	},

	// What it costs.
	{
		name: "near-reads-for-ever",
		bug:  "A process reads the log although it serves nothing",
		file: "internal/near/tier.go",
		old:  "} else if time.Since(lastUsed) >= t.maxLag/2 {",
		new:  "} else if time.Since(lastUsed) < 0 {",
		pkg:  ".", test: "TestNear_Commands",
	},
	{
		name: "near-hint-holds-up-close",
		bug:  "Close waits until the next hint is due",
		file: "internal/near/log.go",
		old:  "time.Duration(wait)*time.Millisecond, nil, closing)",
		new:  "time.Duration(wait)*time.Millisecond, nil, nil)",
		pkg:  "internal/near", test: "TestTier_CloseWhileAHintWaits",
	},
	{
		name: "near-refresh-at-each-read",
		bug:  "Each hit in memory draws whether it refreshes: far more often than once, since hits cost nothing",
		file: "near.go",
		old:  "refreshes && int64(now) >= at &&",
		new:  "refreshes && rand.ExpFloat64()*float64(time.Second) >= float64(time.Until(time.UnixMilli(n.freshUntil))) &&",
		pkg:  ".", test: "TestNear_EarlyRefresh",
	},
}
