package model

// An action is a step of a process, of the server or of time. step changes the state, or returns
// false if the action is not possible.
type action struct {
	name string
	step func(s *state) bool
}

// actions returns everything that may happen.
func (m *model) actions() []action {
	all := []action{
		{"GET of P is executed", m.executeGet},
		{"P receives the value", m.receiveValue},
		{"the reply with the value is lost", m.loseValue},

		{"P sends a read of the log", m.sendRead},
		{"XRANGE is executed", m.executeRange},
		{"XREVRANGE is executed", m.executeNewest},
		{"the marker is appended", m.executeMarker},
		{"P receives the reply of the log", m.receiveRead},
		{"P applies the rest of it", m.finishRead},
		{"the reply of the log is lost", m.loseRead},

		{"a call of P reads the clock", m.beginCall},
		{"the call looks at the proof", m.checkProof},
		{"the call returns", m.endCall},

		{"P calls Delete", with(m.callDelete, true)},
		{"another process calls Delete", with(m.callDelete, false)},

		{"a record about another stripe is appended", with(m.appendOther, false)},
		{"a record about the stripe is appended", with(m.appendOther, true)},
		{"the log is lost", m.loseLog},
		{"a replica copies the log", m.copyLog},
		{"the replica becomes the master", m.failOver},

		{"a tick passes", m.tick},
	}
	for v := version(1); int(v) <= m.deletes+1; v++ {
		all = append(all,
			action{v.String() + " of P is stored", with(m.storeOwn, v)},
			action{v.String() + " of another process is stored", with(m.store, v)})
	}
	for i := range m.deletes {
		v := deleteVersion(i).String()
		all = append(all,
			action{"DEL for " + v + " is answered", with(m.executeDel, i)},
			action{"the record for " + v + " is answered", with(m.executeRecord, i)},
			action{"the record for " + v + " is refused", with(m.refuseRecord, i)},
			action{"DEL of the log for " + v + " is answered", with(m.executeReset, i)},
			action{"Delete of P for " + v + " returns", with(m.returnDelete, i)})
	}
	return all
}

// with binds the argument of a step.
func with[T any](step func(*state, T) bool, arg T) func(*state) bool {
	return func(s *state) bool { return step(s, arg) }
}

// A GetOrLoad of P asks Redis. The reply will replace the value in memory, so P forgets that now:
// the value is checked where P does not ask.

func (m *model) executeGet(s *state) bool {
	if s.reply != (reply{}) || s.value == 0 {
		return false
	}
	s.memory, s.reply = 0, reply{value: s.value, late: !m.keeps(generationBeforeGet)}
	return true
}

// storeOwn stores what P has loaded. P keeps the value when it learns that the server accepted it.
func (m *model) storeOwn(s *state, v version) bool {
	if s.reply != (reply{}) || !m.store(s, v) {
		return false
	}
	s.memory, s.reply = 0, reply{value: v, late: !m.keeps(generationBeforeStore)}
	return true
}

// store stores what a load has found that began after the last DEL was executed. Since then the
// source has had the versions from oldest on.
func (m *model) store(s *state, v version) bool {
	if v > s.source() || v < s.oldest && m.keeps(fence) {
		return false
	}
	s.value = v
	return true
}

func (m *model) receiveValue(s *state) bool {
	if s.reply == (reply{}) {
		return false
	}
	s.memory, s.reply = s.reply.value, reply{}
	return true
}

func (m *model) loseValue(s *state) bool {
	if s.reply == (reply{}) {
		return false
	}
	s.reply = reply{}
	return true
}

// changeGeneration changes the generation of the stripe in P.
func (s *state) changeGeneration() {
	s.memory = 0
	if !s.reply.late {
		s.reply = reply{}
	}
}

// P reads the log.

func (m *model) sendRead(s *state) bool {
	if s.read.step != noRead {
		return false
	}
	s.read = read{step: ranging, sent: s.now()}
	if s.at == (position{}) {
		s.read.step = seeking
	}
	return true
}

func (m *model) executeRange(s *state) bool {
	r := &s.read
	if r.step != ranging {
		return false
	}
	log := s.log
	if s.replica.exists && !m.keeps(masterOnly) {
		log = s.replica.log
	}
	behind, ok := m.behind(log.slice(), s.at)
	if !ok {
		r.step = seeking
		return true
	}
	if m.page > 0 && len(behind)+1 >= m.page {
		r.more, behind = true, behind[:m.page-1]
	}
	r.step, r.last = answered, s.at
	for _, record := range behind {
		r.stripe = r.stripe || record.stripe
		r.told = max(r.told, record.version)
		r.last = record.position
	}
	return true
}

// behind returns the records behind a position. ok is false if P finds that its record is missing.
func (m *model) behind(log []record, at position) (behind []record, ok bool) {
	for len(log) > 0 && log[0].id < at.id {
		log = log[1:]
	}
	switch {
	case len(log) > 0 && log[0].position == at,
		len(log) > 0 && log[0].id == at.id && !m.keeps(nonces):
		return log[1:], true
	case !m.keeps(inclusive):
		return log, true
	}
	return nil, false
}

func (m *model) executeNewest(s *state) bool {
	r := &s.read
	if r.step != seeking {
		return false
	}
	if s.log == (records{}) {
		r.step = marking
		return true
	}
	r.step, r.lost, r.last = answered, true, s.log.newest()
	return true
}

func (m *model) executeMarker(s *state) bool {
	r := &s.read
	if r.step != marking {
		return false
	}
	m.append(s, record{})
	r.step, r.lost, r.last = answered, true, s.log.newest()
	return true
}

// receiveRead and finishRead apply a reply. A call may look into memory in between.
func (m *model) receiveRead(s *state) bool {
	if s.read.step != answered {
		return false
	}
	s.read.step = applying
	if m.keeps(generationsThenProof) {
		m.changeGenerations(s)
	} else {
		m.noteProof(s)
	}
	return true
}

func (m *model) finishRead(s *state) bool {
	if s.read.step != applying {
		return false
	}
	if m.keeps(generationsThenProof) {
		m.noteProof(s)
	} else {
		m.changeGenerations(s)
	}
	s.read = read{}
	return true
}

func (m *model) changeGenerations(s *state) {
	r := &s.read
	drop := dropAtLoss
	if s.at == (position{}) {
		drop = dropAtStart
	}
	if r.stripe || r.lost && m.keeps(drop) {
		s.changeGeneration()
	}
	s.at, s.told = r.last, max(s.told, r.told)
	*r = read{step: r.step, sent: r.sent, more: r.more}
}

func (m *model) noteProof(s *state) {
	switch {
	case s.read.more && m.keeps(readToEnd):
	case m.keeps(proofFromSending):
		s.proof = s.read.sent
	default:
		s.proof = s.now()
	}
}

func (m *model) loseRead(s *state) bool {
	if s.read.step == noRead || s.read.step == applying {
		return false
	}
	s.read = read{}
	return true
}

// A call of P looks into memory. Calls that may return any version are left out.

func (m *model) beginCall(s *state) bool {
	oldest := m.promised(s)
	if s.call.step != noCall || oldest == 0 {
		return false
	}
	s.call = call{step: timed, oldest: oldest}
	if !m.keeps(proofThenGeneration) {
		s.call.step, s.call.found = looked, s.memory
	}
	s.proof.recent = s.proof.age < m.maxLag
	s.read.sent.recent = s.read.step != noRead && s.read.sent.age < m.maxLag
	return true
}

func (m *model) checkProof(s *state) bool {
	if s.call.step != timed {
		return false
	}
	if !s.proof.recent {
		return m.endCall(s)
	}
	s.call.step = proven
	s.proof.recent, s.read.sent.recent = false, false
	return true
}

func (m *model) endCall(s *state) bool {
	if s.call.step == noCall {
		return false
	}
	s.call = call{}
	s.proof.recent, s.read.sent.recent = false, false
	return true
}
