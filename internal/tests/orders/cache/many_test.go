package cache_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// The calls of these tests are for several keys. Redis may execute commands of other processes between
// two commands of a pipeline, so each of them waits for the scheduler by itself.

// ofKeys makes a scenario one of the given keys.
func (s *scenario) ofKeys(keys ...string) {
	s.unroll = make(map[string][]string)
	s.sources = make(map[string]*source)
	for _, key := range keys {
		s.sources[key] = &source{world: s.World, key: key, prefix: key, version: 1}
	}
}

// An unroller sends the commands of a pipeline one after the other, in the order of keys: the fills of
// a call come in any order, and a schedule must repeat.
type unroller struct{ keys []string }

func (s *scenario) unrollerOf(process string) unroller {
	if keys := s.unroll[process]; keys != nil {
		return unroller{keys}
	}
	return unroller{slices.Sorted(maps.Keys(s.sources))}
}

func (unroller) DialHook(next redis.DialHook) redis.DialHook { return next }

func (unroller) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (u unroller) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() == "multi" {
			return next(ctx, cmds)
		}
		place := func(cmd redis.Cmder) int {
			return slices.IndexFunc(u.keys, func(key string) bool { return strings.Contains(cmd.String(), "{"+key+"}") })
		}
		sorted := slices.SortedStableFunc(slices.Values(cmds), func(a, b redis.Cmder) int { return place(a) - place(b) })
		var first error
		for _, cmd := range sorted {
			if err := next(ctx, []redis.Cmder{cmd}); first == nil {
				first = err
			}
		}
		return first
	}
}

// goGetMany starts an actor that calls GetOrLoadMany for keys, each of which is one letter.
func (s *scenario) goGetMany(process, caller, keys string) {
	each := strings.Split(keys, "")
	s.unroll[process] = each
	s.Go(process, caller, func(ctx context.Context) { s.getMany(ctx, process, caller, each...) })
}

// goGetKey starts an actor that calls GetOrLoad.
func (s *scenario) goGetKey(process, caller, key string) {
	s.Go(process, caller, func(ctx context.Context) { _, _ = s.getKey(ctx, s.sources[key], process, caller) })
}

// getMany calls GetOrLoadMany in a process, and checks the result of each key.
func (s *scenario) getMany(ctx context.Context, process, caller string, keys ...string) {
	announced, ended := make(map[string]int), make(map[string]int)
	for _, key := range keys {
		announced[key], ended[key] = s.known(s.sources[key], process)
		ctx = context.WithValue(ctx, endedKey(key), ended[key])
	}
	s.Note(process, fmt.Sprint(caller, announced, ended))
	got, err := s.cache(process).GetOrLoadMany(ctx, keys, func(_ context.Context, keys []string) (map[string]string, error) {
		keys = slices.Sorted(slices.Values(keys))
		values := make(map[string]string)
		for _, key := range keys {
			v, over := s.sources[key].begin(process, ended[key])
			defer over()
			values[key] = v
		}
		s.At(process, fmt.Sprint("loads ", values))
		return values, nil
	})
	if err != nil || len(got) != len(keys) {
		s.Errorf("%s got %v, %v; want %v", caller, got, err, keys)
	}
	for key, v := range got {
		if version := s.sources[key].versionOf(v); version < max(announced[key], 1) {
			s.Errorf("%s got %s for %s, but v%d had been announced before the call", caller, v, key, announced[key])
		}
	}
}

// Calls of several processes with keys in common load each key once, and none of them waits for ever:
// a call that holds the lock of one key does not wait for the lock of another.
func TestOrders_Many(t *testing.T) {
	overlap := func(name, keys string, plan schedule.Plan, begin func(s *scenario)) order {
		return order{name: name, plan: plan, run: func(s *scenario) {
			s.ofKeys(strings.Split(keys, "")...)
			begin(s)
			s.end()
			for _, of := range s.sources {
				of.wantLoads(1)
			}
		}}
	}
	exploreEach(t,
		overlap("ab and ba", "ab", schedule.Plan{AtLeast: 200}, func(s *scenario) {
			s.goGetMany("A", "A", "ab")
			s.goGetMany("B", "B", "ba")
		}),
		overlap("ab and bc", "abc", schedule.Plan{AtLeast: 200}, func(s *scenario) {
			s.goGetMany("A", "A", "ab")
			s.goGetMany("B", "B", "bc")
		}),
		overlap("ab, bc and ca", "abc", schedule.Plan{Sample: 150, Together: true}, func(s *scenario) {
			s.goGetMany("A", "A", "ab")
			s.goGetMany("B", "B", "bc")
			s.goGetMany("C", "C", "ca")
		}),
		overlap("ab, ba and b alone", "ab", schedule.Plan{Sample: 200, Together: true}, func(s *scenario) {
			s.goGetMany("A", "A", "ab")
			s.goGetMany("B", "B", "ba")
			s.goGetKey("C", "C", "b")
		}),
		overlap("ab, ba and b alone, two in one process", "ab", schedule.Plan{AtLeast: 200, Together: true}, func(s *scenario) {
			s.goGetMany("A", "A, the first,", "ab")
			s.goGetMany("A", "A, the second,", "ba")
			s.goGetKey("B", "B", "b")
		}),
	)
}

// A call after a Delete of one key does not get what was loaded for that key before it, by any call.
// The other key is loaded once: the Delete refuses its own key only.
func TestOrders_ManyAndDelete(t *testing.T) {
	all, some := schedule.Plan{AtLeast: 200, Together: true}, schedule.Plan{Sample: 150, Together: true}
	deleted := func(name string, plan schedule.Plan, begin func(s *scenario)) order {
		return order{name: name, plan: plan, run: func(s *scenario) {
			s.ofKeys("a", "b")
			s.goGetMany("A", "A", "ab")
			begin(s)
			s.end()
			s.sources["a"].wantLoads(1)
		}}
	}
	exploreEach(t,
		deleted("in another process, then many", all, func(s *scenario) {
			s.goDelete("C", "b", func(ctx context.Context) { s.getMany(ctx, "B", "B, after the Delete,", "b", "a") })
		}),
		deleted("in another process, then one", all, func(s *scenario) {
			s.goDelete("C", "b", func(ctx context.Context) {
				_, _ = s.getKey(ctx, s.sources["b"], "B", "B, after the Delete,")
			})
		}),
		deleted("in the same process, then many", some, func(s *scenario) {
			s.goDelete("A", "b", func(ctx context.Context) { s.getMany(ctx, "A", "A, after the Delete,", "b", "a") })
		}),
		deleted("while another process waits", some, func(s *scenario) {
			s.goGetMany("B", "B", "ba")
			s.goDelete("C", "b", func(ctx context.Context) { s.getMany(ctx, "B", "B, after the Delete,", "b", "a") })
		}),
	)
}

// goDelete starts an actor that changes the source of a key, deletes the key, and then calls next.
func (s *scenario) goDelete(process, key string, next func(ctx context.Context)) {
	s.Go(process, process+", the deleter,", func(ctx context.Context) {
		_ = s.changeKey(ctx, s.sources[key], process, func(ctx context.Context, c *singlefill.Cache[string]) error {
			return c.Delete(ctx, key)
		})
		s.At(process, "has deleted")
		next(ctx)
	})
}
