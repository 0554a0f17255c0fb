package lock

import (
	"context"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/pause"
)

// maxWorkers bounds the commands of a cleanupQueue at the same time.
const maxWorkers = 8

// A cleanupQueue has the commands that could not be finished during the calls that caused them. Few
// workers send them: a goroutine per call that an outage has ended would be a crowd of goroutines,
// and of commands at a server that has just come back. See TestCleanup_FewCommands.
type cleanupQueue struct {
	mu      sync.Mutex    // no other one is taken with it
	tasks   []cleanupTask // protected by mu; the oldest first, except for those that are retried
	workers int           // protected by mu
}

// A cleanupTask is tried until it is done, or until its end: what it undoes ends by itself then.
type cleanupTask struct {
	try  func() (done bool)
	end  time.Time
	over func() // is called when it is done or has ended
}

// abandon makes the server forget the owner: what it holds, its place in the queue, and any command
// of it that is still in transit.
func (q *cleanupQueue) abandon(ctx context.Context, o *owner) {
	life := o.opts.TTL
	if o.kind.queues() {
		life = max(life, o.opts.WaiterTTL)
	}
	q.add(o.target, cleanupTask{end: time.Now().Add(life), over: func() {}, try: func() bool {
		err := o.kind.abandon(ctx, o)
		return err == nil || !isTemporary(err)
	}})
}

// add has the task tried in the background until it is done or has ended.
func (q *cleanupQueue) add(t *target, task cleanupTask) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tasks = append(q.tasks, task)
	if q.workers < maxWorkers {
		q.workers++
		go q.work(t.opts.RedisTimeout)
	}
}

// work tries one task after the other. It backs off while none succeeds.
func (q *cleanupQueue) work(longest time.Duration) {
	rest := pause.Min
	for {
		task, ok := q.next()
		if !ok {
			return
		}
		if !time.Now().Before(task.end) {
			task.over()
			continue
		}
		if task.try() {
			rest = pause.Min
			task.over()
			continue
		}
		q.mu.Lock()
		q.tasks = append(q.tasks, task)
		q.mu.Unlock()
		time.Sleep(rest)
		rest = min(2*rest, longest)
	}
}

// next removes a task from the queue. If there is none, the calling worker has ended.
func (q *cleanupQueue) next() (task cleanupTask, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.tasks) > 0 {
		task, q.tasks = q.tasks[0], q.tasks[1:]
		return task, true
	}
	q.tasks = nil
	q.workers--
	return cleanupTask{}, false
}
