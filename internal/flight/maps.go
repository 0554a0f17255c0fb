package flight

// small is how many keys a map may have had that is not made anew.
const small = 1000

// emptied returns m, or a new map if m is empty and has had many keys, most of all at one time: a map keeps its largest
// size, also when it is empty. A burst of cold keys would be paid for as long as the cache lives.
func emptied[V any](m map[string]V, most *int) map[string]V {
	*most = max(*most, len(m))
	if len(m) > 0 || *most <= small {
		return m
	}
	*most = 0
	return make(map[string]V)
}
