package main

import "time"

// workerEnv is set for a worker, to its task.
const workerEnv = "STAMPEDE_WORKER"

// A task describes what one worker does.
type task struct {
	Plan      plan
	Contender int
	Namespace string
	URL       string
}

// The phases, which all processes begin at the same time.
const (
	cold     = iota // each goroutine asks once for each key
	expiring        // each goroutine asks repeatedly
	phases
)

var phaseNames = [phases]string{"cold", "expiring"}

// An order starts a phase.
type order struct {
	Phase  int
	Origin time.Time // origin of all reported times
	At     time.Time
}

// A message is what a worker reports.
type message struct {
	State        state
	Calls, Loads int     // so far
	Report       *report // of everything, at the end
}

type state string

const (
	isReady     state = "ready"
	isAsking    state = "asking"
	hasAsked    state = "asked"
	hasReported state = "reported"
)
