package redistest

import (
	"slices"
	"strings"
	"sync"
)

// An Action is what a Proxy does with a command.
type Action int

const (
	// Pass forwards the command and its reply, and counts it.
	Pass Action = iota
	// DropRequest swallows the command. The connection stays open but dead: nothing more is
	// forwarded or answered.
	DropRequest
	// DropReply forwards the command, swallows its reply and closes the connection.
	DropReply
	// MuteReply forwards the command and swallows its reply. The connection stays open and forwards
	// further commands, but no further replies.
	MuteReply
	// HoldRequest holds the command until Release, together with all later commands on the
	// connection. Then it forwards them, even if the client has left.
	HoldRequest
	// HoldReply forwards the command and holds its reply until Release, together with all later
	// replies on the connection.
	HoldReply
	// CloseBefore closes the connection instead of forwarding the command. Commands forwarded
	// earlier are still executed.
	CloseBefore
	// ResetReply forwards the command, forwards the first half of its reply and resets the
	// connection.
	ResetReply
)

// A Rule is one fault and the count of its effects.
type Rule struct {
	match  func(cmd []string) bool
	action Action

	mu      sync.Mutex
	skip    int           // protected by mu: how many matches to skip
	left    int           // protected by mu: how many more commands it applies to
	fired   int           // protected by mu
	hit     chan struct{} // closed at the first effect
	release chan struct{} // closed by Release
}

// Times limits the rule to n commands; 0 disables it. Like After, set it before the traffic that
// the rule is for.
func (r *Rule) Times(n int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = n
	return r
}

// After skips the first k matching commands.
func (r *Rule) After(k int) *Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.skip = k
	return r
}

// Fired returns how often the fault has happened: a reply was dropped, a request is held. A rule on
// a reply does not fire before the server has replied.
func (r *Rule) Fired() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fired
}

// Hit is closed when the rule first fires.
func (r *Rule) Hit() <-chan struct{} { return r.hit }

// Release forwards what HoldRequest or HoldReply holds, and makes the rule hold nothing from then
// on. It may be called again.
func (r *Rule) Release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.release:
	default:
		close(r.release)
	}
}

// takes reports whether the rule applies to cmd, and counts it against Times.
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

// Command matches the commands with one of the names, in any case.
func Command(names ...string) func(cmd []string) bool {
	return func(cmd []string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(cmd[0], name) })
	}
}
