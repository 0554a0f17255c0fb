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
	var h maphash.Hash
	h.SetSeed(hashSeed)
	fmt.Fprint(&h, w.history[process], time.Since(w.begun), what)
	w.history[process] = h.Sum64()
}

// state returns a hash of everything that the future depends on.
func (w *World) state() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	var h maphash.Hash
	h.SetSeed(hashSeed)
	now := time.Now()
	fmt.Fprintln(&h, now.Sub(w.begun), w.pauses, w.faults, w.actors)
	for _, process := range slices.Sorted(maps.Keys(w.history)) {
		fmt.Fprintln(&h, process, w.history[process])
	}
	for _, process := range slices.Sorted(maps.Keys(w.cut)) {
		fmt.Fprintln(&h, process, max(0, w.cut[process].Sub(now)))
	}
	for _, i := range w.waiting {
		fmt.Fprintln(&h, i, max(0, i.until.Sub(now)))
	}
	h.WriteString(w.named(w.dump()))
	return h.Sum64()
}

// dump returns the content of the server.
func (w *World) dump() string {
	var b strings.Builder
	for _, key := range w.Server.Keys() {
		fmt.Fprintln(&b, key, (w.Server.TTL(key) + time.Millisecond - 1).Truncate(time.Millisecond))
		switch w.Server.Type(key) {
		case "string":
			text, _ := w.Server.Get(key)
			fmt.Fprintln(&b, text)
		case "zset":
			scores, _ := w.Server.SortedSet(key)
			fmt.Fprintln(&b, w.sorted(scores))
		case "stream":
			records, _ := w.Server.Stream(key)
			fmt.Fprintf(&b, "%q\n", records)
		case "hash":
			fields, _ := w.Server.HKeys(key)
			for _, f := range fields {
				fmt.Fprintln(&b, f, w.Server.HGet(key, f))
			}
		}
	}
	return b.String()
}

func (w *World) sorted(scores map[string]float64) (lines []string) {
	for member, score := range scores {
		lines = append(lines, fmt.Sprintf("%v %s", score, w.named(member)))
	}
	slices.Sort(lines)
	return lines
}
