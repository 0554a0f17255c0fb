package main

import "time"

// workerEnv is the environment variable that makes a process a worker, and contains its task.
const workerEnv = "STAMPEDE_WORKER"

// A task describes what one worker does on orders.
type task struct {
	Plan      plan
	Contender int
	Namespace string
	URL       string
}

// The phases. All processes begin them at the same time.
const (
	cold     = iota // each goroutine asks once for each key
	expiring        // each goroutine asks again and again
	phases
)

var phaseNames = [phases]string{"cold", "expiring"}

// An order begins a phase.
type order struct {
	Phase  int
	Origin time.Time // of all reported times
	At     time.Time
}

// A message is what a worker reports to its parent.
type message struct {
	State        state
	Calls, Loads int     // so far
	Report       *report // complete, with the last message
}

type state string

const (
	isReady     state = "ready"
	isAsking    state = "asking"
	hasAsked    state = "asked"
	hasReported state = "reported"
)
