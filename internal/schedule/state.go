package schedule

import (
	"fmt"
	"hash/maphash"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

var (
	token = regexp.MustCompile(`[A-Z2-7]{26}`)
	stamp = regexp.MustCompile(`9\d{14}`) // µs in the year 2000, where bubbles begin
)

// The random bytes of an entry; see package entry.
const (
	entryMagic = "\xc1\x01"
	randomFrom = 27
	randomTo   = 35
)

// nameTokens names the random values of a process, in the order of its commands. So the names are
// equal in all schedules in which it has seen the same.
func (w *World) nameTokens(process string, args []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, arg := range args {
		for _, s := range stamp.FindAllString(arg, -1) {
			w.name(process, s)
		}
		switch t := token.FindString(arg); {
		case t != "":
			arg = t
		case strings.HasPrefix(arg, entryMagic) && len(arg) >= randomTo:
			arg = arg[randomFrom:randomTo]
		// The random bytes that it writes into an entry.
		case args[0] == "expire" && i == len(args)-1:
		default:
			continue
		}
		w.name(process, arg)
	}
}

// nameStamps names the server's times in the replies to a process.
func (w *World) nameStamps(process, replies string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range stamp.FindAllString(replies, -1) {
		w.name(process, s)
	}
}

func (w *World) name(process, s string) {
	if w.names[s] == "" {
		w.drawn[process]++
		w.names[s] = fmt.Sprintf("<%s%d>", process, w.drawn[process])
	}
}

// named replaces random values by their names. Values that a scenario stored before the run have
// none.
func (w *World) named(s string) string {
	for at := 0; ; at += len(entryMagic) {
		next := strings.Index(s[at:], entryMagic)
		if next < 0 {
			break
		}
		if at += next; len(s)-at >= randomTo && w.names[s[at+randomFrom:at+randomTo]] == "" {
			w.names[s[at+randomFrom:at+randomTo]] = "<old>"
		}
	}
	for token, name := range w.names {
		s = strings.ReplaceAll(s, token, name)
	}
	return s
}

// saw adds something to what a process has seen, and when.
func (w *World) saw(process, what string) {
	w.history[process] = hash(w.history[process], time.Since(w.begun), what)
}

// state returns a hash of everything that the future depends on.
func (w *World) state() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := []any{time.Since(w.begun), w.actors}
	for _, process := range slices.Sorted(maps.Keys(w.history)) {
		seen = append(seen, process, w.history[process])
	}
	for _, i := range w.waiting {
		seen = append(seen, i)
	}
	var content strings.Builder
	for _, key := range w.Server.Keys() {
		text, err := w.Server.Get(key)
		if err != nil {
			panic(fmt.Sprintf("schedule: %s: %v: only texts are part of the state", key, err))
		}
		fmt.Fprintln(&content, key, (w.Server.TTL(key) + time.Millisecond - 1).Truncate(time.Millisecond), text)
	}
	return hash(append(seen, w.named(content.String()))...)
}

var hashSeed = maphash.MakeSeed()

func hash(of ...any) uint64 { return maphash.String(hashSeed, fmt.Sprintln(of...)) }
