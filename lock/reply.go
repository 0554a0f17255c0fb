package lock

import (
	"fmt"
	"math"
	"time"
)

// A request is what a command to acquire says besides the token.
type request struct {
	enqueue  bool // takes a place in the queue
	reserves bool // reserves the next grant
	listens  bool // takes a place among the waiters that a release wakes

	// waitingSince is the server's time in µs at which the process began to wait. 0: now.
	waitingSince int64

	// others has the tokens of other waiters of the process, which take places in the queue, or keep them.
	others []string
}

// A reply is the answer to a request.
type reply struct {
	state   string
	sent    time.Time // when the command was sent
	unknown bool      // a try of the command had no answer: see client.Reply
	number  int64     // held: the fence; busy: ask again within so many ms
	free    bool      // busy, but not held: it is kept for another waiter

	ahead     int64         // number of waiters ahead in the queue; -1: unknown
	lastFence int64         // of the last grant
	age       time.Duration // of the last grant
	place     int64         // in the queue; 0: none. Without a queue, 1: it did not wait before; 2: that tells nothing
	holder    string        // busy: the token of the holder, or of the waiter that it is kept for
	places    []int64       // in the queue, of request.others; 0: the attempt has ended
	expired   []string      // the tokens whose leases ended without a release
}

// left returns for how long a busy answer is true at most: until the holder's lease ends.
func (r reply) left() time.Duration {
	return time.Duration(min(r.number, int64(time.Hour/time.Millisecond))) * time.Millisecond
}

// States of a reply.
const (
	held = "held"
	busy = "busy"
	kept = "kept" // becomes busy and free
)

// parseReply reads the answer of a script that acquires.
func parseReply(answer any) (r reply, err error) {
	if fence, ok := answer.(int64); ok {
		return reply{state: held, number: fence}, nil
	}
	fields, _ := answer.([]any)
	var numbers [5]int64
	ok := len(fields) >= 2
	for i, field := range fields {
		switch {
		case i == 0:
			r.state, ok = field.(string)
		case i <= len(numbers) && ok:
			numbers[i-1], ok = field.(int64)
		case ok:
			var token string
			token, ok = field.(string)
			r.expired = append(r.expired, token)
		}
	}
	if !ok {
		return r, fmt.Errorf("unexpected reply %v", answer)
	}
	if r.state == kept {
		r.state, r.free = busy, true
	}
	if r.state == busy && len(r.expired) > 0 {
		r.holder, r.expired = r.expired[0], r.expired[1:]
	}
	r.number, r.ahead, r.lastFence, r.place = numbers[0], numbers[1], numbers[2], numbers[4]
	r.age = time.Duration(min(numbers[3], int64(math.MaxInt64/time.Microsecond))) * time.Microsecond
	return r, nil
}
