// Package shape measures how the files of the library hang together.
package shape

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Limits of a package.
const (
	mostCircle  = 4 // files that use each other's declarations, in one circle
	mostFiles   = 4 // files with methods of one type
	mostParams  = 5
	mostResults = 3
	mostFields  = 12 // of a struct; an embedded one counts as one
)

// wideStructs are the structs with more fields, each with its reason. Options, settings, counts and sets of functions
// are lists: they have no state.
var wideStructs = map[string]string{
	".Options": "a list", ".settings": "a list", ".Trace": "a list", ".Stats": "a list",
	"/internal/event.Stats": "a list", "/internal/event.counters": "a list", "/internal/event.Trace": "a list",
	".rooms":                  "what a cache consists of; nothing of it changes",
	"/internal/fill.Parts":    "what a Filler is made of; nothing of it changes",
	"/internal/flight.Fill":   "what a fill is, and what callers know of it, under one mutex",
	"/internal/flight.Waiter": "one allocation for each caller and key: what the call sets, what Join sets, what Wait sets",
	"/internal/near.Copy":     "its fields are ordered for lines of memory, which a struct in it would pad",
	"/internal/near.Tier":     "atomics that hits read without a lock",
	"/lock.attempt":           "what the goroutine of an attempt knows, and what others tell it under the mutex of its queue",
	"/lock.Lease":             "atomics that its holder, its renewals and its release set without a lock",
}

// A shape is what the limits are about. Each list has the largest that there is.
type shape struct {
	circle  []string // files
	methods []string // a type, and the files with its methods
	wide    []string // functions with too many parameters or results
	structs []string // with too many fields
}

// above are the packages that do not keep the limits yet, with what they have: files of the largest circle, most
// files with methods of one type, and wide functions. Make these numbers smaller, never larger.
var above = map[string]struct{ circle, files, wide int }{
	"/cmd/singlefill": {8, 8, 0},
}

// No package of the library has a circle of more than four files, a type whose methods are in more than four, a
// function of more than five parameters or three results, or a struct of more than twelve fields, but for those that
// are listed above.
func TestShape(t *testing.T) {
	if testing.Short() {
		t.Skip("it compiles the library")
	}
	t.Parallel()
	const module = "github.com/singlefill/singlefill"
	wide := make(map[string]bool)
	for path, s := range shapes(t, "./lock", "./singlefilltest", "./cmd/singlefill", ".") {
		name := strings.TrimPrefix(path, module)
		may, isListed := above[name]
		for _, of := range s.structs {
			if wide[name+"."+of] = true; wideStructs[name+"."+of] == "" {
				t.Errorf("%s.%s has more than %d fields: split it, or give the reason", path, of, mostFields)
			}
		}
		good := true
		for _, c := range []struct {
			what       string
			got        []string
			count      int
			limit, may int
		}{
			{"files in a circle", s.circle, len(s.circle), mostCircle, may.circle},
			{"files with methods of one type", s.methods, max(len(s.methods)-1, 0), mostFiles, may.files},
			{"functions of more than five parameters or three results", s.wide, len(s.wide), 0, may.wide},
		} {
			good = good && c.count <= c.limit
			if most := max(c.limit, c.may); c.count > most {
				t.Errorf("%s has %d %s, %d are allowed: %q", path, c.count, c.what, most, c.got)
			} else if c.count < c.may {
				t.Logf("%s has %d %s: write this number in place of %d", path, c.count, c.what, c.may)
			}
		}
		if isListed && good {
			t.Errorf("%s keeps the limits: take it out of the list", path)
		}
	}
	for name := range wideStructs {
		if !wide[name] {
			t.Errorf("%s has at most %d fields: take it out of the list", name, mostFields)
		}
	}
}

// listed is what go list prints of a package.
type listed struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
	Module                  *struct{ Main bool }
}

// shapes returns the shapes of packages of this module and of those that they import.
func shapes(t *testing.T, packages ...string) map[string]shape {
	t.Helper()
	list := exec.Command("go", append([]string{"list", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles,Module"}, packages...)...)
	list.Dir, list.Stderr = "../..", os.Stderr
	out, err := list.Output()
	redistest.Must(t, err)
	exports, found := make(map[string]string), make(map[string]shape)
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for packages := json.NewDecoder(bytes.NewReader(out)); ; { // dependencies come before what imports them
		var p listed
		err := packages.Decode(&p)
		if err == io.EOF {
			return found
		}
		redistest.Must(t, err)
		exports[p.ImportPath] = p.Export
		if p.Module == nil || !p.Module.Main {
			continue
		}
		var files []*ast.File
		for _, name := range p.GoFiles {
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			redistest.Must(t, err)
			files = append(files, file)
		}
		found[p.ImportPath] = measure(t, p.ImportPath, fset, files, imports)
	}
}

func measure(t *testing.T, path string, fset *token.FileSet, files []*ast.File, imports types.Importer) (s shape) {
	t.Helper()
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object), Defs: make(map[*ast.Ident]types.Object)}
	pkg, err := (&types.Config{Importer: imports}).Check(path, fset, files, info)
	redistest.Must(t, err)
	file := func(at token.Pos) string { return filepath.Base(fset.Position(at).Filename) }
	uses := make(map[string]map[string]bool) // file to file
	for id, of := range info.Uses {
		if from, to := file(id.Pos()), file(of.Pos()); of.Pkg() == pkg && from != to {
			add(uses, from, to)
		}
	}
	for name := range uses {
		var circle []string
		for other := range reach(uses, name) {
			if reach(uses, other)[name] {
				circle = append(circle, other)
			}
		}
		if len(circle) > len(s.circle) {
			s.circle = slices.Sorted(slices.Values(circle))
		}
	}
	methods := make(map[string]map[string]bool) // type to files
	for _, f := range files {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			sig := info.Defs[fn.Name].Type().(*types.Signature)
			if sig.Params().Len() > mostParams || sig.Results().Len() > mostResults {
				s.wide = append(s.wide, fmt.Sprint(fn.Name, sig.Params(), sig.Results()))
			}
			if sig.Recv() != nil {
				name, _, _ := strings.Cut(types.TypeString(sig.Recv().Type(), types.RelativeTo(pkg)), "[")
				add(methods, strings.TrimPrefix(name, "*"), file(fn.Pos()))
			}
		}
	}
	for _, name := range pkg.Scope().Names() {
		if of, ok := pkg.Scope().Lookup(name).(*types.TypeName); ok && !of.IsAlias() {
			if st, ok := of.Type().Underlying().(*types.Struct); ok && st.NumFields() > mostFields {
				s.structs = append(s.structs, name)
			}
		}
	}
	for name, in := range methods {
		if len(in) >= len(s.methods) {
			s.methods = append([]string{name}, slices.Sorted(maps.Keys(in))...)
		}
	}
	return s
}

func add(m map[string]map[string]bool, from, to string) {
	if m[from] == nil {
		m[from] = make(map[string]bool)
	}
	m[from][to] = true
}

// reach returns the files that a file uses, directly or through others.
func reach(uses map[string]map[string]bool, from string) map[string]bool {
	seen := make(map[string]bool)
	for next := []string{from}; len(next) > 0; next = next[1:] {
		for to := range uses[next[0]] {
			if !seen[to] {
				seen[to] = true
				next = append(next, to)
			}
		}
	}
	return seen
}
