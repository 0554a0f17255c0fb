package local

// Slot is slot.
var Slot = slot
