package model

// A model is the protocol within bounds, perhaps with one rule broken.
type model struct {
	deletes  int       // how often the key is deleted
	log      int       // how many records the server keeps
	page     int       // how many records a reply has at most; 0: all
	maxLag   uint8     // in ticks
	others   otherKeys // what is appended besides
	failover bool      // a replica may become the master

	broken rule
	// withoutExcuse expects a Delete to keep its promise after a failover that has undone it.
	withoutExcuse bool
}

// otherKeys says which records about other keys may be appended.
type otherKeys int

const (
	noOthers otherKeys = iota
	otherStripes
	allStripes
)

// A rule of the protocol.
type rule int

const (
	_ rule = iota

	// Rules for Delete.
	recordAfterDel   // the record is appended after DEL has been answered
	resetIfRefused   // if the server refuses the record, Delete deletes the log
	bumpBeforeReturn // the generation in the calling process changes before Delete returns
	fence            // a value whose load began before a DEL is not stored after it

	// Rules for the read of the log.
	masterOnly           // a replica does not answer it
	inclusive            // it begins with the last known record, and expects to find that
	nonces               // the record must have the nonce as well as the ID
	dropAtLoss           // if the record is missing, P drops everything in memory
	dropAtStart          // P does the same when it has no position yet
	readToEnd            // there is no proof until a reply has the newest record
	proofFromSending     // the age of a proof counts from when the read was sent
	generationsThenProof // the generations change before the proof is noted

	// Rules for GetOrLoad.
	generationBeforeGet   // the generation is taken before GET is sent
	generationBeforeStore // the generation is taken before a loaded value is sent
	proofThenGeneration   // a call looks at the proof before it compares the generation

	endOfRules
)

func (m *model) keeps(r rule) bool { return m.broken != r }

func (m *model) initial() state {
	return state{oldest: 1, proof: instant{age: m.maxLag}}
}
