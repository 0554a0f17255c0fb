// Package masters finds the servers that hold keys of a namespace, and asks them.
package masters

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A Finder finds the servers that hold keys of a namespace, through the user's client alone: that may be
// any type around a client of a Cluster, and that type may do nothing but route commands by their
// keys. Its methods are for use inside of [client.Do].
type Finder struct {
	rdb       redis.UniversalClient
	namespace string
	one       atomic.Bool // one server is known to have all keys
}

// New returns the Finder of a namespace.
func New(c *client.Client, namespace string) *Finder {
	f := &Finder{rdb: c.Redis, namespace: namespace}
	f.one.Store(c.Local != nil)
	return f
}

// A Layout is the servers that hold the keys of a client, as they were at one time.
type Layout struct {
	Masters []Master
	state   string // the processes of the servers, and the slots of a Cluster with their masters
}

// A Master is a server that holds a part of the keys, or all of them.
type Master struct {
	rdb    redis.UniversalClient
	beside string // a key that it has in a Cluster; empty: rdb asks no other server
}

// Layout finds the servers that hold keys of the namespace.
func (f *Finder) Layout(ctx context.Context) (l Layout, err error) {
	if l, err = f.masters(ctx); err != nil {
		return l, err
	}
	for _, master := range l.Masters {
		process, err := master.Process(ctx)
		if err != nil {
			return l, err
		}
		l.state += process + "\n"
	}
	return l, nil
}

func (f *Finder) masters(ctx context.Context) (l Layout, err error) {
	if ring, ok := f.rdb.(shards); ok {
		for _, shard := range ring.GetShardClients() {
			l.Masters = append(l.Masters, Master{rdb: shard})
		}
		if up, all := len(l.Masters), len(ring.Options().Addrs); up != all { // SetAddrs does not change the options
			err = fmt.Errorf("rdb, a %T, reaches %d shards, and was made with %d: one is away, or SetAddrs was called", f.rdb, up, all)
		}
		return l, err
	}
	several, err := f.several(ctx)
	if err != nil || !several {
		return Layout{Masters: []Master{{rdb: f.rdb}}}, err
	}
	slots, err := f.slots(ctx)
	if err != nil {
		return l, err
	}
	known := make(map[string]bool)
	for _, r := range slots {
		if len(r.Nodes) == 0 {
			continue
		}
		master := r.Nodes[0].ID + " " + r.Nodes[0].Addr
		l.state += fmt.Sprintln(r.Start, r.End, master)
		if !known[master] {
			known[master] = true
			l.Masters = append(l.Masters, Master{f.rdb, f.checkKey(tagIn(r))})
		}
	}
	return l, nil
}

// MasterOf returns the server of a key, and whether other keys are on other servers.
func (f *Finder) MasterOf(ctx context.Context, key string) (m Master, several bool, err error) {
	if ring, ok := f.rdb.(shards); ok {
		if _, err := f.masters(ctx); err != nil { // the key may have been another shard's
			return m, true, err
		}
		shard, err := ring.GetShardClientForKey(key)
		return Master{rdb: shard}, true, err
	}
	several, err = f.several(ctx)
	return Master{f.rdb, key}, several, err
}

// Changed reports whether a server was replaced or restarted since, or a slot has moved or is being moved.
func (f *Finder) Changed(ctx context.Context, since Layout) (bool, error) {
	for _, master := range since.Masters {
		if master.beside == "" {
			continue
		}
		if moves, err := master.movesSlots(ctx); err != nil || moves {
			return moves, err
		}
	}
	now, err := f.Layout(ctx)
	return now.state != since.state, err
}

// movesSlots reports whether the server gives a slot to another one, or takes one. CLUSTER SLOTS does not
// show that until all keys have been moved; CLUSTER NODES does, in brackets on the line of the server itself.
func (m Master) movesSlots(ctx context.Context) (bool, error) {
	cmd := redis.NewStringCmd(ctx, m.args("cluster", "nodes")...)
	err := m.ask(ctx, cmd)
	if redis.HasErrorPrefix(err, "This instance has cluster support disabled") { // the user gave ClusterSlots
		return false, nil
	}
	for line := range strings.Lines(cmd.Val()) {
		if strings.Contains(line, "myself") && strings.Contains(line, " [") {
			return true, nil
		}
	}
	return false, err
}

// Key returns a key that this server has, if there are others in its Cluster.
func (m Master) Key() string { return m.beside }

// Types that embed a client of go-redis have its methods.
type (
	shards interface {
		Options() *redis.RingOptions
		GetShardClients() []*redis.Client // those that answer
		GetShardClientForKey(key string) (*redis.Client, error)
	}
	clusterOptions interface{ Options() *redis.ClusterOptions }
)

// several reports whether the keys are on several servers, as in a Cluster. If the type of the
// client does not say so, a transaction does: only one server that has all keys executes one with keys
// of two slots.
func (f *Finder) several(ctx context.Context) (bool, error) {
	if _, cluster := f.rdb.(clusterOptions); cluster {
		return true, nil
	}
	if f.one.Load() {
		return false, nil
	}
	err := client.Transaction(ctx, f.rdb, func(p redis.Pipeliner) {
		p.PTTL(ctx, f.checkKey("a"))
		p.PTTL(ctx, f.checkKey("b"))
	})
	if redis.HasErrorPrefix(err, "CROSSSLOT ") || client.Redirected(err) {
		return true, nil
	}
	f.one.Store(err == nil)
	return false, err
}

// slots returns the slots of a Cluster, and their nodes, masters first.
func (f *Finder) slots(ctx context.Context) ([]redis.ClusterSlot, error) {
	if cluster, ok := f.rdb.(clusterOptions); ok && cluster.Options().ClusterSlots != nil {
		return cluster.Options().ClusterSlots(ctx)
	}
	slots, err := f.rdb.ClusterSlots(ctx).Result()
	if err != nil && !client.Unreachable(err) {
		return nil, fmt.Errorf("keys are on several servers, and rdb, a %T, does not say on which: pass the *redis.ClusterClient itself: %w", f.rdb, err)
	}
	return slots, err
}

// checkKey returns a key that no caller uses.
func (f *Finder) checkKey(tag string) string { return f.namespace + ":check:{" + tag + "}:slot" }

// tagIn returns a hash tag of one of the slots.
func tagIn(r redis.ClusterSlot) string {
	for i := 0; ; i++ {
		if tag := strconv.Itoa(i); slotOf(tag) >= r.Start && slotOf(tag) <= r.End {
			return tag
		}
	}
}

// slotOf returns the slot of a hash tag: its CRC-16 (XMODEM).
func slotOf(tag string) int {
	crc := uint16(0)
	for i := range len(tag) {
		crc ^= uint16(tag[i]) << 8
		for range 8 {
			carry := crc >> 15
			crc = crc<<1 ^ carry*0x1021
		}
	}
	return int(crc) % 16384
}

// ScanCount is how many keys of the database one step of SCAN looks at. It takes a server less than a
// millisecond.
const ScanCount = 500

// Literal returns a pattern of SCAN that matches s only.
func Literal(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// Scan is one step of SCAN.
func (m Master) Scan(ctx context.Context, cursor uint64, pattern string, count int64) ([]string, uint64, error) {
	cmd := redis.NewScanCmd(ctx, nil, m.args("scan", cursor, "match", pattern, "count", count)...)
	err := m.ask(ctx, cmd)
	keys, next := cmd.Val()
	return keys, next, err
}

// Size returns how many keys the server has.
func (m Master) Size(ctx context.Context) (int64, error) {
	cmd := redis.NewIntCmd(ctx, m.args("dbsize")...)
	err := m.ask(ctx, cmd)
	return cmd.Val(), err
}

// Process names the process of the server. Another one, as after a restart or a failover behind one address,
// takes the cursor of a SCAN for a place in its own order. A server that does not know the question, such as
// miniredis, has no name.
func (m Master) Process(ctx context.Context) (string, error) {
	cmd := redis.NewStringCmd(ctx, m.args("info", "server")...)
	err := m.ask(ctx, cmd)
	if err != nil && !client.Unreachable(err) && !client.ScriptsRefused(err) {
		return "", nil
	}
	_, id, _ := strings.Cut(cmd.Val(), "run_id:")
	id, _, _ = strings.Cut(id, "\r")
	return id, err
}

// History names the data of the server, and of the replicas that have all of it.
func (m Master) History(ctx context.Context) (string, error) {
	cmd := redis.NewStringCmd(ctx, m.args("info", "replication")...)
	if err := m.ask(ctx, cmd); err != nil {
		return "", err
	}
	_, id, ok := strings.Cut(cmd.Val(), "master_replid:")
	if !ok {
		return "", errors.New("INFO replication has no master_replid")
	}
	id, _, _ = strings.Cut(id, "\r")
	return id, nil
}

// ask sends a command without a key to the server. In a Cluster it goes in a transaction with a
// command that has a key: that reaches the master of the key, also where the client reads from
// replicas.
func (m Master) ask(ctx context.Context, cmd redis.Cmder) error {
	if m.beside == "" {
		_ = m.rdb.Process(ctx, cmd) // cmd has the error
		return cmd.Err()
	}
	cmd.SetFirstKeyPos(int8(len(cmd.Args()) - 1))
	err := client.Transaction(ctx, m.rdb, func(p redis.Pipeliner) {
		p.PTTL(ctx, m.beside)
		_ = p.Process(ctx, aside{cmd})
	})
	if client.Redirected(err) {
		return fmt.Errorf("rdb, a %T, does not reach each master of the Cluster: a *redis.ClusterClient does: %w", m.rdb, err)
	}
	return err
}

// args returns the arguments of a command for ask.
func (m Master) args(args ...any) []any {
	if m.beside != "" {
		args = append(args, m.beside)
	}
	return args
}

// An aside is a command that has no key, and goes where its last argument, which is not sent, is a key.
// Otherwise the client of a Cluster would take another argument for the key, such as the pattern of SCAN.
type aside struct{ redis.Cmder }

// Args is called when the command is written to a connection.
func (a aside) Args() []any {
	args := a.Cmder.Args()
	return slices.Clip(args[:len(args)-1])
}
