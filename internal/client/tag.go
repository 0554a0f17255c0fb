package client

import "strings"

// HashTag returns the non-empty name as a hash tag, for use in braces: keys that begin with the
// same tag are in one slot of a Cluster. Redis ends the tag at the first '}' in name. A leading '}'
// would make the tag empty and spread the keys, so it is escaped, and so is a leading '%':
// different names have different tags.
func HashTag(name string) string {
	switch name[0] {
	case '}':
		return "%7D" + name[1:]
	case '%':
		return "%25" + name[1:]
	}
	return name
}

// Untag returns the name whose hash tag this is.
func Untag(tag string) string {
	switch {
	case strings.HasPrefix(tag, "%7D"):
		return "}" + tag[3:]
	case strings.HasPrefix(tag, "%25"):
		return "%" + tag[3:]
	}
	return tag
}
