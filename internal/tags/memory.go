package tags

import "github.com/singlefill/singlefill/internal/local"

// Without Redis the tags are in the [local.Store] of the client, and nothing of them is ever lost. A load reads the
// sequence, asks the source, and stores its value. The store looks at the marks of its tags, and adds the key to the
// keys of each, in one step: see [local.Step.Tag]. So there is no book, and no note.

// Tagging returns what a store in memory has to know of the tags of a value. since are the sequences before its load;
// nil: it was not loaded.
func (x *Index) Tagging(key string, tags []string, since *Sequences) local.Tagging {
	t := local.Tagging{Key: key, Tags: tags, Since: local.Unproved}
	if x != nil {
		t.Space = x.namespace
	}
	if since != nil {
		t.Since = since.memory
	}
	return t
}
