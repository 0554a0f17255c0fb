package cache_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

var sideBySide = flag.Duration("sidebyside", 2*time.Second, "how long processes of two versions serve side by side")

// versionedRole is a process that serves a type of one version. Its arguments are the address of Redis, a namespace and
// the version. It asks for all keys in turn, in several goroutines, until it gets the order to end.
const versionedRole = "versioned"

const versionedKeys, versionedCallers = 500, 4

// A versioned value has a Mail since version 1.
type versioned struct{ Name, Mail string }

// versionedReport is what a process of versionedRole has seen.
type versionedReport struct {
	Calls   int
	Missing int      // values without a Mail
	Errors  []string // of calls
}

func init() { redistest.Role(versionedRole, runVersioned) }

func runVersioned(p *redistest.Child) {
	ctx, rdb := context.Background(), redis.NewClient(&redis.Options{Addr: p.Args[0]})
	defer rdb.Close()
	version, err := strconv.Atoi(p.Args[2])
	must(err)
	opts := &singlefill.Options[versioned]{ // no stall makes a command time out
		Version: uint32(version), EarlyRefresh: -1, LockTTL: 30 * time.Second, RedisTimeout: 9 * time.Second, LoadTimeout: time.Minute,
	}
	if version == 0 {
		opts.EarlyRefresh = 1e6 // a hit in six refreshes what took 2 ms and lives for an hour
	}
	c, err := singlefill.New(rdb, p.Args[1], time.Hour, opts)
	must(err)
	load := func(ctx context.Context, key string) (v versioned, err error) {
		time.Sleep(2 * time.Millisecond)
		if v.Name = key; version > 0 {
			v.Mail = key + "@example.com"
		}
		return v, rdb.HIncrBy(ctx, loadsKey(p.Args[1], p.Args[2]), key, 1).Err()
	}
	p.Say("ready")
	end := make(chan struct{})
	var r versionedReport
	var mu sync.Mutex
	var callers sync.WaitGroup
	for i := range versionedCallers {
		callers.Go(func() {
			for k := i * versionedKeys / versionedCallers; ; k++ {
				select {
				case <-end:
					return
				default:
				}
				v, err := c.GetOrLoad(ctx, fmt.Sprint(k%versionedKeys), load)
				mu.Lock()
				if r.Calls++; err != nil {
					r.Errors = append(r.Errors, err.Error())
				} else if v.Mail == "" {
					r.Missing++
				}
				mu.Unlock()
			}
		})
	}
	p.Next()
	close(end)
	callers.Wait()
	must(c.Close())
	data, err := json.Marshal(r)
	must(err)
	p.Say("saw %s", data)
}

// Processes of two versions serve side by side. Once the new ones are there, each key is loaded once more by reason of
// its version, none is loaded by an old process again, and no new process serves a value that lacks a field.
func TestVersion_SideBySide(t *testing.T) {
	t.Parallel()
	server, ns := redistest.Start(t), redistest.Namespace(t)
	loads := func(version string) (n map[string]string) {
		n, err := server.Admin().HGetAll(t.Context(), loadsKey(ns, version)).Result()
		redistest.Must(t, err)
		return n
	}
	start := func(version string) (p *redistest.Process) {
		p = redistest.Spawn(t, versionedRole, server.Addr, ns, version)
		p.Expect("ready")
		return p
	}
	before := []*redistest.Process{start("0"), start("0")}
	redistest.Await(t, "the old processes have loaded each key", func() bool { return len(loads("0")) == versionedKeys })
	after := []*redistest.Process{start("1"), start("1")}
	redistest.Await(t, "the new processes have loaded each key", func() bool { return len(loads("1")) == versionedKeys })
	replaced := loads("0")
	time.Sleep(*sideBySide)
	for i, p := range append(before, after...) {
		p.Send("end")
		var r versionedReport
		redistest.Must(t, json.Unmarshal([]byte(p.Expect("saw ")), &r))
		t.Logf("process %d: %d calls, %d without the field", i, r.Calls, r.Missing)
		if len(r.Errors) > 0 || r.Calls < versionedKeys || i >= len(before) && r.Missing > 0 {
			t.Errorf("process %d: %+v", i, r)
		}
	}
	for key, n := range loads("1") {
		if n != "1" {
			t.Errorf("the new processes have loaded %s %s times", key, n)
		}
	}
	for key, n := range loads("0") {
		if n != replaced[key] {
			t.Errorf("the old processes have loaded %s again although it has the new version: %s, then %s times", key, replaced[key], n)
		}
	}
}
