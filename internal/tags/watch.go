package tags

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Where the server refuses scripts, transactions do what the scripts of the same names do.

// A state is what a transaction has read of a book and of the indexes of tags.
type state struct {
	now    int64 // ms since 1970
	micros int64 // the same in µs
	epoch  string
	n      int64
	floor  int64
	known  string
	ends   []int64 // until when values may have each tag
	marks  []int64
	books  time.Duration
	lives  []time.Duration // of the indexes; negative: there is none
	gone   [][]any         // members of the indexes to drop
	ended  []string        // fields to drop
}

func (x *books) readState(ctx context.Context, tx *redis.Tx, p page) (s state, err error) {
	book := x.book(p.book)
	fields := []string{"e", "n", "f", "k"}
	for _, t := range p.tags {
		fields = append(fields, "t"+t.tag, "m"+t.tag)
	}
	var now *redis.TimeCmd
	var values *redis.SliceCmd
	var life *redis.DurationCmd
	var some *redis.KeyValueSliceCmd
	lives, firsts := make([]*redis.DurationCmd, len(p.tags)), make([]*redis.ZSliceCmd, len(p.tags))
	_, err = tx.Pipelined(ctx, func(q redis.Pipeliner) error {
		now, values, life = q.Time(ctx), q.HMGet(ctx, book, fields...), q.PTTL(ctx, book)
		some = q.HRandFieldWithValues(ctx, book, 16*len(p.tags)) // book.lua looks again
		for i, t := range p.tags {
			lives[i] = q.PTTL(ctx, x.index(t.tag))
			some := &redis.ZRangeBy{Min: "-inf", Max: "+inf", Count: 2 * int64(len(t.keys))}
			firsts[i] = q.ZRangeByScoreWithScores(ctx, x.index(t.tag), some)
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	text := func(i int) string { v, _ := values.Val()[i].(string); return v }
	s = state{
		now: now.Val().UnixMilli(), micros: now.Val().UnixMicro(), books: life.Val(),
		epoch: text(0), n: number(text(1)), floor: number(text(2)), known: text(3),
	}
	for i := range p.tags {
		s.ends = append(s.ends, number(text(4+2*i)))
		s.marks = append(s.marks, number(text(5+2*i)))
		s.lives = append(s.lives, lives[i].Val())
		if s.ends[i] > s.now && s.lives[i] < 0 { // the index has been lost
			s.epoch = ""
		}
		var gone []any
		for _, first := range firsts[i].Val() {
			if int64(first.Score) <= s.now {
				gone = append(gone, first.Member)
			}
		}
		s.gone = append(s.gone, gone)
	}
	for _, field := range some.Val() {
		n, ends, mark := strings.Cut(field.Value, " ")
		switch {
		case field.Key[0] == 't' && number(field.Value) < s.now:
			s.ended = append(s.ended, field.Key)
		case mark && field.Key[0] == 'm' && number(ends) < s.now:
			s.ended = append(s.ended, field.Key)
			s.floor = max(s.floor, number(n))
		}
	}
	return s, nil
}

// number returns the first number of a field.
func number(field string) int64 {
	field, _, _ = strings.Cut(field, " ")
	n, _ := strconv.ParseInt(field, 10, 64)
	return n
}

func (x *books) watched(p page) []string {
	keys := []string{x.book(p.book)}
	for _, t := range p.tags {
		keys = append(keys, x.index(t.tag))
	}
	return keys
}

// begin begins a new book if the old one, or an index, has been lost. Otherwise it drops what has ended. It returns
// the epoch.
func (s *state) begin(ctx context.Context, p redis.Pipeliner, book string) (epoch string) {
	if s.epoch != "" {
		if len(s.ended) > 0 {
			p.HDel(ctx, book, s.ended...)
			p.HSet(ctx, book, "f", s.floor)
		}
		return s.epoch
	}
	epoch = rand.Text()
	p.Unlink(ctx, book)
	p.HSet(ctx, book, "e", epoch, "n", 0)
	p.PExpire(ctx, book, bookLife)
	s.books, s.n, s.ends = bookLife, 0, make([]int64, len(s.ends))
	return epoch
}

func (x *books) watchNote(ctx context.Context, p page, since string) (epoch string, err error) {
	const grace = time.Minute
	book := x.book(p.book)
	_, err = client.Watch(ctx, x.client.Redis, x.watched(p), func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		epoch = "" // of an earlier try
		s, err := x.readState(ctx, tx, p)
		if err != nil {
			return nil, false, err
		}
		if since != "" {
			known, sequence, _ := strings.Cut(since, " ")
			n := number(sequence)
			if known != s.epoch || n < s.floor || n > s.n || slices.Max(s.marks) > n {
				return func(q redis.Pipeliner) { s.begin(ctx, q, book) }, false, nil
			}
		}
		return func(q redis.Pipeliner) {
			epoch = s.begin(ctx, q, book)
			longest := bookLife
			for i, t := range p.tags {
				index, life := x.index(t.tag), time.Duration(0)
				if len(s.gone[i]) > 0 { // first: a key may come back
					q.ZRem(ctx, index, s.gone[i]...)
				}
				for _, key := range t.keys {
					life = max(life, x.noted(key.Life))
					q.ZAddGT(ctx, index, redis.Z{Score: float64(s.now + x.noted(key.Life).Milliseconds()), Member: key.Key})
				}
				q.PExpire(ctx, index, max(s.lives[i], life+grace)) // the removal may have emptied it
				q.HSet(ctx, book, "t"+t.tag, max(s.ends[i], s.now+life.Milliseconds()))
				longest = max(longest, life+grace)
			}
			if s.books < longest {
				q.PExpire(ctx, book, longest)
			}
		}, true, nil
	})
	return epoch, err
}

func (x *books) watchMark(ctx context.Context, p page, history string) (m markReply, err error) {
	book := x.book(p.book)
	_, err = client.Watch(ctx, x.client.Redis, x.watched(p), func(ctx context.Context, tx *redis.Tx) (func(redis.Pipeliner), bool, error) {
		s, err := x.readState(ctx, tx, p)
		if err != nil {
			return nil, false, err
		}
		m = markReply{}
		if s.epoch != "" && s.known == s.epoch+" "+history {
			m.known = s.known
		}
		for _, life := range s.lives {
			m.exists = append(m.exists, life >= 0)
		}
		return func(q redis.Pipeliner) {
			s.begin(ctx, q, book)
			n := max(s.n+1, s.micros)
			q.HSet(ctx, book, "n", n)
			for _, t := range p.tags {
				q.HSet(ctx, book, "m"+t.tag, fmt.Sprint(n, " ", s.now+x.markLife.Milliseconds()))
			}
			if s.books < bookLife {
				q.PExpire(ctx, book, bookLife)
			}
		}, true, nil
	})
	return m, err
}
