package near

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/wake"
)

// A Log is the stream in which the processes of a namespace note what they have invalidated. A
// record has one field. Its name is random, so that no two records are equal, even if a server that
// has lost the newest ones gives an ID a second time. Its value is one of
//
//	""        nothing: the record is there to be found again
//	"*"       all keys of the namespace
//	else      8 bytes for each key: the FNV-1a hash of its value key, big-endian
//
// No command that the bound depends on is a script, so that it needs no right to run scripts.
type Log struct {
	client *client.Client
	key    string
	life   time.Duration
	alone  bool   // it has no readers, so nothing is written
	guest  *guest // nil: this process has memory

	hints      atomic.Int64 // since the last hint was begun
	background func(run func(closing <-chan struct{}))
}

const (
	// maxLen is about how many records the log has at most. A process that is further behind drops
	// its memory.
	maxLen = 4096

	// minLife is how long the log lives after the last command for it.
	minLife = 10 * time.Minute

	// perRecord is how many keys a record has at most, and perRead how many records one reply has.
	perRecord = 256
	perRead   = 256

	everything = "*"
)

// Hash returns what a record has of a key. It is the same in every process.
func Hash(key string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(key) {
		h = (h ^ uint64(key[i])) * 1099511628211
	}
	return h
}

// OneServer reports whether all keys of a client are on one server, which executes the commands of
// a pipeline in order. Then a record may go in the pipeline of the commands that it is about.
// Otherwise it must be sent when they have been answered: a process that reads the record first
// could take the old value from another node into memory again.
func (l *Log) OneServer() bool {
	_, one := l.client.Redis.(*redis.Client)
	return one && !l.alone && l.guest == nil
}

// Add adds a record to a pipeline. keys are at most perRecord keys.
func (l *Log) Add(ctx context.Context, p redis.Pipeliner, keys []string) *redis.StringCmd {
	return l.add(ctx, p, hashesOf(keys))
}

func hashesOf(keys []string) string {
	var hashes []byte
	for _, key := range keys {
		hashes = binary.BigEndian.AppendUint64(hashes, Hash(key))
	}
	return string(hashes)
}

func (l *Log) add(ctx context.Context, p redis.Pipeliner, value string) *redis.StringCmd {
	added := p.XAdd(ctx, &redis.XAddArgs{Stream: l.key, MaxLen: maxLen, Approx: true, Values: []string{rand.Text(), value}})
	p.PExpire(ctx, l.key, l.life)
	return added
}

// Append appends records of keys, after their invalidation has been answered.
func (l *Log) Append(ctx context.Context, keys []string) error {
	for keys := range slices.Chunk(keys, perRecord) {
		if err := l.append(ctx, hashesOf(keys)); err != nil {
			return err
		}
	}
	return nil
}

// AppendAll appends a record of all keys, after their invalidation has been answered.
func (l *Log) AppendAll(ctx context.Context) error { return l.append(ctx, everything) }

func (l *Log) append(ctx context.Context, value string) error {
	if l.alone {
		return nil
	}
	if l.guest != nil {
		l.tell()
		return nil
	}
	_, err := client.Do(ctx, l.client, op, l.key, func(ctx context.Context) (string, error) {
		var added *redis.StringCmd
		_, err := client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
			added = l.add(ctx, p, value)
		})
		return added.Val(), err
	})
	if err != nil && !client.Unreachable(err) {
		err = l.Reset(ctx)
	}
	return err
}

// Reset removes the log. Every process then drops its memory. It is for a record that the server
// refuses, for example for want of memory, since it always has memory for a DEL.
func (l *Log) Reset(ctx context.Context) error {
	_, err := client.Do(ctx, l.client, op, l.key, func(ctx context.Context) (int64, error) {
		return l.client.Redis.Del(ctx, l.key).Result()
	})
	return err
}

// op is the purpose of all commands for the log.
const op = "near"

// A position is a record of the log, or none.
type position struct{ id, name string }

// A news is what a process has read in the log.
type news struct {
	sent    time.Time        // when the process asked
	lost    bool             // records may be missing: everything may have been invalidated
	records []redis.XMessage // the known one first
	hashes  []uint64         // of the keys that were invalidated
	more    bool             // there may be more
}

var errLog = errors.New("the near log holds something else")

// read returns what has been appended behind a record, and the last record. It reads that record
// again: if it is not there any more, the log has lost records.
//
// A replica must not answer, and a master that has been replaced must notice. So each read is
// followed by a write: it also prolongs the life of the log.
func (l *Log) read(ctx context.Context, from position) (n news, last position, err error) {
	what := client.Command{Op: op, Key: l.key, Within: l.client.Timeout, Again: client.Always, Now: true}
	n, err = client.DoWithin(ctx, l.client, what, func(ctx context.Context) (n news, err error) {
		n.sent = time.Now()
		if from != (position{}) {
			var behind *redis.XMessageSliceCmd
			_, err = client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
				behind = p.XRangeN(ctx, l.key, from.id, "+", perRead)
				p.PExpire(ctx, l.key, l.life)
			})
			if n.records = behind.Val(); err != nil || len(n.records) > 0 && positionOf(n.records[0]) == from {
				return n, err
			}
		}
		n.lost = true
		n.records, err = l.newest(ctx)
		return n, err
	})
	if err != nil {
		return news{}, from, err
	}
	last = positionOf(n.records[len(n.records)-1])
	n.more = len(n.records) == perRead
	for _, record := range n.records[1:] {
		if err := n.note(record); err != nil {
			n.lost = true
		}
	}
	return n, last, nil
}

// newest returns the newest record. It appends one to an empty log.
func (l *Log) newest(ctx context.Context) ([]redis.XMessage, error) {
	for range 3 {
		var newest *redis.XMessageSliceCmd
		_, err := client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
			newest = p.XRevRangeN(ctx, l.key, "+", "-", 1)
			p.PExpire(ctx, l.key, l.life)
		})
		if err != nil {
			return nil, err
		}
		if records := newest.Val(); len(records) > 0 {
			return records, nil
		}
		_, err = client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
			l.add(ctx, p, "")
		})
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: %q is empty", errLog, l.key)
}

func positionOf(record redis.XMessage) position {
	p := position{id: record.ID}
	for name := range record.Values {
		p.name = name
	}
	return p
}

// note notes what a record says. Anybody who can write to Redis can write records.
func (n *news) note(record redis.XMessage) error {
	for _, value := range record.Values {
		text, _ := value.(string)
		if text == everything {
			n.lost = true
			continue
		}
		if len(text)%8 != 0 {
			return errLog
		}
		for hashes := []byte(text); len(hashes) > 0; hashes = hashes[8:] {
			n.hashes = append(n.hashes, binary.BigEndian.Uint64(hashes))
		}
	}
	return nil
}

// Check returns an error if the server refuses a command for the log. It sends them for another log in
// the same slot, which no process reads, and removes that log.
func (l *Log) Check(ctx context.Context) error {
	if l.alone {
		return nil
	}
	other := &Log{client: l.client, key: l.key + ":{" + l.key + "}:check:" + rand.Text(), life: l.life}
	_, err := client.Do(ctx, l.client, op, other.key, func(ctx context.Context) (int, error) {
		cmds, err := client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
			other.add(ctx, p, "")
			p.XRangeN(ctx, other.key, "-", "+", 1)
			p.XRevRangeN(ctx, other.key, "+", "-", 1)
			p.Del(ctx, other.key)
		})
		return len(cmds), err
	})
	return err
}

// WakeOthers makes the other processes read the log soon. However many records there are, this
// process sends one hint at a time.
func (l *Log) WakeOthers(ctx context.Context) {
	if l.alone || l.guest != nil || l.hints.Add(1) > 1 {
		return
	}
	l.background(func(closing <-chan struct{}) {
		for {
			n := l.hints.Load()
			l.Hint(ctx, closing)
			if l.hints.CompareAndSwap(n, 0) {
				return
			}
		}
	})
}

// Hint wakes the processes that read the log. A hint may be lost: they also read it by themselves.
//
// It costs the server time for each process that listens, and each of them reads. So hints are rare
// where many listen: a hint that comes too early is sent a moment later, together with the hints of
// other processes. When closing is closed, none is sent later.
func (l *Log) Hint(ctx context.Context, closing <-chan struct{}) {
	for range 2 {
		wait, err := client.Do(ctx, l.client, "wake", l.key, func(ctx context.Context) (int64, error) {
			wait, err := hint.Run(ctx, l.client.Redis, []string{l.key, l.toldKey()}, hintCost.Microseconds()).Int64()
			if client.ScriptsRefused(err) {
				return 0, nil // then they are not woken
			}
			return wait, err
		})
		if err != nil || wait <= 0 {
			return
		}
		if _, open := pause(time.Duration(wait)*time.Millisecond, nil, closing); !open {
			return
		}
		// If others have sent a hint since, it was for this record, too.
	}
}

// hintCost is the time between two hints for each process that listens. A message costs the server
// about 6 µs, and the read that follows 12 µs: together they take less than a twentieth of its time.
const hintCost = 500 * time.Microsecond

// toldKey returns a key in the slot of the log. It exists while the next hint must wait.
func (l *Log) toldKey() string { return l.key + ":{" + l.key + "}:told" }

var hint = redis.NewScript(wake.Lua + `
local wait = redis.call('PTTL', KEYS[2])
if wait > 0 then
  return wait
end
local heard = wake(KEYS[1], '')
if type(heard) == 'number' then
  wait = math.floor(heard * tonumber(ARGV[1]) / 1000)
  if wait > 0 then
    redis.call('SET', KEYS[2], '', 'PX', wait)
  end
end
return 0
`)
