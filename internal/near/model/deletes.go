package model

// Actions around the process P: Deletes, the log on the server, and time.

// P or another process deletes the key. A command and its answer are one step: the process only
// waits in between.

func (m *model) callDelete(s *state, byP bool) bool {
	for i := range m.deletes {
		if d := &s.deletes[i]; d.step == notCalled {
			d.step, d.byP = called, byP
			return true
		}
	}
	return false
}

func (m *model) executeDel(s *state, i int) bool {
	d := &s.deletes[i]
	switch d.step {
	case called:
		d.step = deleted
	case recorded:
		d.endLog()
	default:
		return false
	}
	s.value, s.oldest = 0, s.source()
	return true
}

func (m *model) executeRecord(s *state, i int) bool {
	d := &s.deletes[i]
	switch {
	case d.step == deleted:
		d.endLog()
	case d.step == called && !m.keeps(recordAfterDel):
		d.step = recorded
	default:
		return false
	}
	return m.append(s, record{stripe: true, version: deleteVersion(i)})
}

func (m *model) refuseRecord(s *state, i int) bool {
	d := &s.deletes[i]
	if d.step != deleted {
		return false
	}
	d.step = refused
	if !m.keeps(resetIfRefused) {
		d.endLog()
	}
	return true
}

func (m *model) executeReset(s *state, i int) bool {
	d := &s.deletes[i]
	if d.step != refused {
		return false
	}
	d.endLog()
	m.loseLog(s)
	return true
}

// endLog is called when the last command has been answered. Another process returns at once: if it
// returned later, it would promise less.
func (d *deletion) endLog() {
	d.step = logged
	if !d.byP {
		d.step = hasReturned
	}
}

func (m *model) returnDelete(s *state, i int) bool {
	d := &s.deletes[i]
	if d.step != logged {
		return false
	}
	d.step = hasReturned
	if m.keeps(bumpBeforeReturn) {
		s.changeGeneration()
	}
	return true
}

// The log on the server changes.

func (m *model) append(s *state, r record) bool {
	r.position = position{s.log.newest().id + 1, s.losses}
	kept := s.log.slice()
	if len(kept) == m.log {
		kept = kept[1:]
	}
	var log records
	copy(log[:], kept)
	log[len(kept)] = r
	s.log = log
	return true
}

// appendOther appends a record about another key, or the marker of another process.
func (m *model) appendOther(s *state, stripe bool) bool {
	if m.others == noOthers || stripe && m.others != allStripes {
		return false
	}
	return m.append(s, record{stripe: stripe})
}

// loseLog stands for FLUSHALL, DEL, expiry, eviction and a restart without persistence. IDs begin
// again, as if the clock of the server had been set back.
func (m *model) loseLog(s *state) bool {
	if s.log == (records{}) {
		return false
	}
	s.log = records{}
	s.losses++
	return true
}

func (m *model) copyLog(s *state) bool {
	if !m.failover {
		return false
	}
	s.replica = replica{exists: true, log: s.log}
	for i := range s.deletes {
		d := &s.deletes[i]
		d.copied = d.step >= logged && !d.byP
	}
	return true
}

// failOver loses what has happened to the log since the replica copied it. The key is on another
// node of the Cluster, and keeps its value.
func (m *model) failOver(s *state) bool {
	if !s.replica.exists || s.replica.log == s.log {
		return false
	}
	s.log, s.replica = s.replica.log, replica{}
	s.losses++
	for i := range s.deletes {
		d := &s.deletes[i]
		d.undone = d.undone || d.step >= logged && !d.copied && !d.byP
		d.copied = false
	}
	s.call.oldest = min(s.call.oldest, m.promised(s))
	return true
}

// Time passes.

func (m *model) tick(s *state) bool {
	age := func(age *uint8) { *age = min(*age+1, m.maxLag) }
	age(&s.proof.age)
	if s.read.step != noRead {
		age(&s.read.sent.age)
	}
	for i := range s.deletes {
		if d := &s.deletes[i]; d.step == hasReturned {
			age(&d.age)
		}
	}
	return true
}

func (s *state) now() instant {
	return instant{recent: s.call.step == timed || s.call.step == looked}
}
