package lock

import (
	"context"
	"sync"
	"time"
)

// debts are what a Locker still has to tell the server, behind the calls that have left it to be told: at a server
// that does not answer there may be many, but few are tried at a time.
type debts struct {
	mu      sync.Mutex
	owed    []debt // protected by mu; the oldest first, but for those that have been tried
	workers int    // protected by mu
}

// A debt is settled by a command that may have to be repeated. At its end it has settled itself.
type debt struct {
	settle func() (done bool)
	end    time.Time
}

const maxWorkers = 8

// owe has settle called until it is done, or what it is about has ended by itself, after life.
func (l *Locker) owe(life time.Duration, settle func() (done bool)) {
	d := &l.debts
	d.mu.Lock()
	defer d.mu.Unlock()
	d.owed = append(d.owed, debt{settle, time.Now().Add(life)})
	if d.workers < maxWorkers {
		d.workers++
		go d.work(l.opts.RedisTimeout)
	}
}

// work tries one after the other, ever more rarely while none can be settled.
func (d *debts) work(longest time.Duration) {
	pause := firstPause
	for {
		debt, ok := d.next()
		if !ok {
			return
		}
		if debt.settle() {
			pause = firstPause
			continue
		}
		d.mu.Lock()
		d.owed = append(d.owed, debt)
		d.mu.Unlock()
		time.Sleep(pause)
		pause = min(2*pause, longest)
	}
}

// next takes one out. When there is none, the worker who asks has ended.
func (d *debts) next() (next debt, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.owed) > 0 {
		next, d.owed = d.owed[0], d.owed[1:]
		if time.Now().Before(next.end) {
			return next, true
		}
	}
	d.owed = nil
	d.workers--
	return debt{}, false
}

// giveUp makes the server forget the ticket: what it holds, what it waits for, and what a command that is still on
// its way would take.
func (t *ticket) giveUp(ctx context.Context) {
	tries, life := 0, t.opts.TTL
	if t.kind.queues() {
		life = max(life, t.opts.WaiterTTL)
	}
	t.owe(life, func() bool {
		tries++
		err := t.kind.abandon(ctx, t)
		// What has never been sent leaves nothing. The second look is for a command that was just being written
		// when the call ended.
		return err == nil || !mayPass(err) || tries > 1 && !t.sent.Load()
	})
}
