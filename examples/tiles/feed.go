package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/singlefill/singlefill"
)

// A feed reports to the page what a process does: the Stats of its cache, and its latest Trace
// events.
type feed struct {
	run string // distinguishes this process from an earlier one on the same port

	mu     sync.Mutex
	events []event // protected by mu: the latest events
	begin  int     // protected by mu: the number of earlier events
}

// keptEvents is how many past events a page gets when it connects, or connects again.
const keptEvents = 2000

func newFeed() *feed {
	return &feed{run: fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())}
}

// An event is something that happened to a tile, or to Redis.
type event struct {
	Kind     string `json:"kind"` // load, wait, stale, redis or breaker
	At       int64  `json:"at"`   // Unix ms
	Tile     string `json:"tile,omitempty"`
	Millis   int64  `json:"ms"`                 // of a load or wait
	Refresh  bool   `json:"refresh,omitempty"`  // a load in the background, while the tile is still served
	Unlocked bool   `json:"unlocked,omitempty"` // a load without the fill lock
	Open     bool   `json:"open,omitempty"`     // the breaker
	Op       string `json:"op,omitempty"`       // the operation that failed in Redis
	Error    string `json:"error,omitempty"`
}

// A count carries Stats. It is sent when they have changed.
type count struct {
	Kind  string           `json:"kind"` // stats
	Stats singlefill.Stats `json:"stats"`
}

func (f *feed) trace() *singlefill.Trace {
	return &singlefill.Trace{
		LoadDone: func(_ context.Context, l singlefill.LoadInfo) {
			e := event{Kind: "load", Tile: l.Key, Millis: l.Duration.Milliseconds(), Refresh: l.Refresh, Unlocked: l.Unlocked}
			if l.Err != nil {
				e.Error = l.Err.Error()
			}
			f.add(e)
		},
		WaitDone: func(_ context.Context, w singlefill.WaitInfo) {
			f.add(event{Kind: "wait", Tile: w.Key, Millis: w.Duration.Milliseconds()})
		},
		Stale: func(_ context.Context, key string, _ singlefill.ValueInfo) {
			f.add(event{Kind: "stale", Tile: key})
		},
		RedisError: func(_ context.Context, op string, err error) {
			f.add(event{Kind: "redis", Op: op, Error: err.Error()})
		},
		BreakerChanged: func(open bool) {
			f.add(event{Kind: "breaker", Open: open})
		},
	}
}

func (f *feed) add(e event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e.At = time.Now().UnixMilli()
	f.events = append(f.events, e)
	if surplus := len(f.events) - keptEvents; surplus > 0 {
		f.events, f.begin = f.events[surplus:], f.begin+surplus
	}
}

// since returns the kept events from number n on, and the number of the next event.
func (f *feed) since(n int) (events []event, next int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next = f.begin + len(f.events)
	for n = max(n, f.begin); n < next; n++ {
		events = append(events, f.events[n-f.begin])
	}
	return events, next
}

// serve answers GET /events. A browser that lost its connection continues where it stopped.
func (f *feed) serve(stats func() singlefill.Stats) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		next := 0
		if run, n, _ := strings.Cut(r.Header.Get("Last-Event-ID"), "/"); run == f.run {
			next, _ = strconv.Atoi(n)
		}
		var told *singlefill.Stats
		stream(w, r, func(send func(id string, message any)) {
			var events []event
			events, next = f.since(next)
			for i, e := range events {
				send(fmt.Sprintf("%s/%d", f.run, next-len(events)+i+1), e)
			}
			now := stats()
			now.NearAge = 0 // it changes all the time
			if told == nil || now != *told {
				send("", count{"stats", now})
				told = &now
			}
		})
	}
}

// streamEvery is the time between two polls of a stream for news, and so the age of news at most.
// With polls, the code that makes news need not know its listeners.
const streamEvery = 100 * time.Millisecond

// stream sends server-sent events until the client has left: it calls news again and again.
func stream(w http.ResponseWriter, r *http.Request, news func(send func(id string, message any))) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	fmt.Fprint(w, "retry: 1000\n\n") // ms until the browser reconnects
	tick := time.NewTicker(streamEvery)
	defer tick.Stop()
	for {
		news(func(id string, message any) {
			data, err := json.Marshal(message)
			if err != nil {
				panic(err) // our types can be encoded
			}
			if id != "" {
				fmt.Fprintf(w, "id: %s\n", id)
			}
			fmt.Fprintf(w, "data: %s\n\n", data)
		})
		if http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}
