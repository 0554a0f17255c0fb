package model

import (
	"fmt"
	"strings"
)

// The largest bounds of a model.
const (
	maxDeletes = 2
	maxLog     = 3
)

// A version is one of the value at the source, which begins with 1. Each Delete is called because
// the source has changed to the next version. 0 is no value.
type version uint8

// A state is everything that the future depends on, and what the invariants need of the past.
type state struct {
	// The server, and the Deletes of all processes.
	value   version // under the key
	oldest  version // that may be stored: what the source had when the last DEL was executed
	log     records
	losses  uint8 // how often the log has lost records other than by trimming
	replica replica
	deletes [maxDeletes]deletion

	// P. No generation is stored here. Generations only grow, so P can never serve a value with an
	// old one. When the generation changes, the model clears memory and reply instead.
	memory version
	reply  reply
	at     position // the last record that P knows
	read   read
	proof  instant // when the last read was sent whose reply P has applied
	call   call
	told   version // the newest Delete whose record P has applied
}

// records are the records of a log, oldest first. The rest of the array is zero.
type records [maxLog]record

// A record tells that a key was deleted.
type record struct {
	position
	stripe  bool    // the key is in the stripe; false for a marker, which has no key
	version version // of the Delete, if it deleted the key itself
}

// A position identifies a record; the zero position is none. The server assigns each record the ID
// after the newest one, so after a loss it may assign an ID again. The nonce is random in reality.
// Here it is the number of losses before the record, which is different for records with one ID.
type position struct{ id, nonce uint8 }

// A replica has the log as it was at some time.
type replica struct {
	exists bool
	log    records
}

// A deletion is a Delete of the key.
type deletion struct {
	step   deleteStep
	byP    bool
	age    uint8 // in ticks since Delete returned, at most maxLag
	copied bool  // the replica knows what the Delete did to the log; false if byP
	undone bool  // a failover has undone what the Delete did to the log; false if byP
}

type deleteStep uint8

const (
	notCalled   deleteStep = iota
	called                 // the source has changed, and DEL is in transit
	recorded               // the record was appended before DEL was executed: a broken rule
	deleted                // DEL was answered, and the record is in transit
	refused                // the record was refused, and a DEL of the log is in transit
	logged                 // the last command was answered
	hasReturned            // without an error
)

// A reply with a value is in transit to P.
type reply struct {
	value version
	late  bool // P takes the generation when the reply arrives: a broken rule
}

// A read of the log is in flight.
type read struct {
	step readStep
	sent instant

	// What the reply says.
	lost   bool     // the record was missing, or P had no position
	stripe bool     // a record is about the stripe
	told   version  // the newest Delete of the key
	more   bool     // the reply is full, so there may be more records
	last   position // the last record in it
}

type readStep uint8

const (
	noRead   readStep = iota
	ranging           // XRANGE is in transit
	seeking           // the record was missing; XREVRANGE for the newest record is in transit
	marking           // the log was empty; a marker is in transit
	answered          // the reply is in transit
	applying          // P has taken one of two steps to apply the reply
)

// An instant is a time in the past.
type instant struct {
	age    uint8 // in ticks, at most maxLag
	recent bool  // it is less than maxLag before the time of the call
}

// A call is a GetOrLoad of P that looks into memory.
type call struct {
	step   callStep
	oldest version // that the call may return
	found  version // with the current generation, if the call has not looked at the proof yet
}

type callStep uint8

const (
	noCall callStep = iota
	timed           // the call has read the clock
	proven          // the proof is recent; the call looks for a value with the current generation
	looked          // the call has found one, and looks at the proof: a broken rule
)

// deleteVersion returns the version for which a Delete is called.
func deleteVersion(i int) version { return version(i + 2) }

// source returns the version at the source.
func (s *state) source() version {
	v := version(1)
	for _, d := range s.deletes {
		if d.step != notCalled {
			v++
		}
	}
	return v
}

func (l *records) slice() []record {
	n := 0
	for n < maxLog && l[n] != (record{}) {
		n++
	}
	return l[:n]
}

// newest returns the position of the newest record, or none.
func (l *records) newest() position {
	if records := l.slice(); len(records) > 0 {
		return records[len(records)-1].position
	}
	return position{}
}

// index returns the index of a record, or -1.
func (l *records) index(p position) int {
	for i, r := range l.slice() {
		if r.position == p {
			return i
		}
	}
	return -1
}

// String returns what a reader of a trace needs.
func (s *state) String() string {
	log := strings.Trim(fmt.Sprint(s.log.slice()), "[]")
	return fmt.Sprintf("Redis %v, log [%s]; P %v, at %v, proof %d old",
		s.value, log, s.memory, s.at, s.proof.age)
}

func (v version) String() string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("v%d", uint8(v))
}

func (p position) String() string {
	if p == (position{}) {
		return "-"
	}
	return fmt.Sprintf("%d.%d", p.id, p.nonce)
}

func (r record) String() string {
	switch {
	case r.version != 0:
		return fmt.Sprintf("%v:%v", r.position, r.version)
	case r.stripe:
		return fmt.Sprintf("%v:stripe", r.position)
	}
	return fmt.Sprintf("%v:other", r.position)
}
