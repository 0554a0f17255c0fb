package tags

import (
	"fmt"
	"slices"
)

const maxNameLen = 256 // bytes

// Names returns tags without duplicates.
func Names(tags []string) ([]string, error) {
	for _, tag := range tags {
		if tag == "" || len(tag) > maxNameLen {
			return nil, fmt.Errorf("singlefill: tag is %.100q, of %d bytes: 1 to %d bytes are allowed", tag, len(tag), maxNameLen)
		}
	}
	if len(tags) < 2 {
		return tags, nil
	}
	tags = slices.Clone(tags)
	slices.Sort(tags)
	return slices.Compact(tags), nil
}
