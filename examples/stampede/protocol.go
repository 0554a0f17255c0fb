package main

import "time"

// workerEnv says that this process is a worker, and holds its task.
const workerEnv = "STAMPEDE_WORKER"

// A task is what one worker has to do, on orders.
type task struct {
	Plan      plan
	Contender int
	Namespace string
	URL       string
}

// The phases, which all processes begin at the same time.
const (
	cold     = iota // each goroutine asks once for each key
	expiring        // each goroutine asks again and again
	phases
)

var phaseNames = [phases]string{"cold", "expiring"}

// An order begins a phase.
type order struct {
	Phase  int
	Origin time.Time // of all times that are reported
	At     time.Time
}

// A message is what a worker says about itself.
type message struct {
	State        state
	Calls, Loads int     // so far
	Report       *report // of all, at the end
}

type state string

const (
	isReady     state = "ready"
	isAsking    state = "asking"
	hasAsked    state = "asked"
	hasReported state = "reported"
)
