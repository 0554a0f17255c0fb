package redistest

import (
	"math"
	"strings"
	"sync"
)

// Action is what a Proxy does with a command.
type Action int

const (
	// Pass forwards the command and its reply: the rule only counts.
	Pass Action = iota
	// DropRequest swallows the command. The connection stays open and is dead
	// from there on: nothing more is forwarded, nothing more is answered.
	DropRequest
	// DropReply forwards the command, swallows its reply and closes the connection.
	DropReply
	// MuteReply forwards the command and swallows its reply. The connection stays
	// open and forwards further commands, but nothing more is answered.
	MuteReply
	// HoldRequest keeps the command back until Release, together with all that
	// follow it on the connection, and forwards it then even if the client has
	// left meanwhile.
	HoldRequest
	// HoldReply forwards the command and keeps its reply back until Release,
	// together with all that follow it on the connection.
	HoldReply
	// CloseBefore closes the connection instead of forwarding the command. What
	// was forwarded before is still executed.
	CloseBefore
	// Twice forwards the command two times and swallows the first of the replies,
	// as if the client had lost it and tried again.
	Twice
	// ResetReply forwards the command, passes on the first half of its reply and
	// resets the connection.
	ResetReply
)

// Rule is one fault and the count of its effects.
type Rule struct {
	match  func(cmd []string) bool
	action Action

	mu      sync.Mutex
	skip    int           // protected by mu: how many matches are still to pass
	left    int           // protected by mu: how many more commands it may take
	fired   int           // protected by mu
	hit     chan struct{} // closed at the first effect
	release chan struct{} // closed by Release
}

func newRule(match func([]string) bool, action Action) *Rule {
	return &Rule{
		match: match, action: action, left: math.MaxInt,
		hit: make(chan struct{}), release: make(chan struct{}),
	}
}

// Times limits the rule to n commands; 0 switches it off. As with After, set it
// before the traffic that the rule is meant for.
func (r *Rule) Times(n int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = n
	return r
}

// After lets the first k matching commands pass.
func (r *Rule) After(k int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.skip = k
	return r
}

// Fired returns how often the fault has come about: a reply was dropped, a
// request is parked. A rule on a reply has not fired before the server replied.
func (r *Rule) Fired() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fired
}

// Hit is closed when the rule fires for the first time.
func (r *Rule) Hit() <-chan struct{} { return r.hit }

// Release lets go what HoldRequest or HoldReply keeps back, and from there on
// the rule holds nothing. It may be called again.
func (r *Rule) Release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.release:
	default:
		close(r.release)
	}
}

// takes reports whether the rule is to be applied to cmd, and uses up one of its
// times.
func (r *Rule) takes(cmd []string) bool {
	if !r.match(cmd) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.skip > 0 {
		r.skip--
		return false
	}
	if r.left == 0 {
		return false
	}
	r.left--
	return true
}

func (r *Rule) fire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fired++; r.fired == 1 {
		close(r.hit)
	}
}

// Any matches every command.
func Any([]string) bool { return true }

// Command matches the commands with one of the names, in any case.
func Command(names ...string) func(cmd []string) bool {
	return func(cmd []string) bool {
		for _, name := range names {
			if strings.EqualFold(cmd[0], name) {
				return true
			}
		}
		return false
	}
}
