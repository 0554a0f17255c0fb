package client

// HashTag returns name, which is not empty, as it is to stand in braces: keys that begin with the same such tag are in
// one slot of a Cluster. The tag goes as far as the first '}' of name if it has one. A leading '}' would make it empty
// and part the keys, so it is escaped, and the '%' that escapes it too: no two names have the same.
func HashTag(name string) string {
	switch name[0] {
	case '}':
		return "%7D" + name[1:]
	case '%':
		return "%25" + name[1:]
	}
	return name
}
