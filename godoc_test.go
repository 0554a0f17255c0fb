package singlefill_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestGodocIsWhole finds what is exported without a comment, links in comments that lead nowhere, and examples that
// nothing runs.
func TestGodocIsWhole(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`(?m)^(?:[^\t\n].*)?(\[\*?[A-Z][\w.]*\])`) // a line that begins with a tab is code
	for _, dir := range []string{".", "lock"} {
		var files []*ast.File
		fset := token.NewFileSet()
		names, _ := filepath.Glob(filepath.Join(dir, "*.go")) // the pattern is a good one
		for _, name := range names {
			f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		for _, e := range doc.Examples(files...) {
			if e.Output == "" {
				t.Errorf("%s: Example%s has no output, so it is never run", dir, e.Name)
			}
		}
		p, err := doc.NewFromFiles(fset, files, filepath.Join("github.com/singlefill/singlefill", dir))
		if err != nil {
			t.Fatal(err)
		}
		comments, funcs, vars := map[string]string{"the package": p.Doc}, p.Funcs, p.Vars
		for _, typ := range p.Types {
			comments[typ.Name] = typ.Doc
			funcs, vars = slices.Concat(funcs, typ.Funcs, typ.Methods), append(vars, typ.Vars...)
		}
		for _, f := range funcs {
			if f.Name != "Error" { // it says itself what it is
				comments[f.Recv+" "+f.Name] = f.Doc
			}
		}
		for _, v := range vars {
			for _, spec := range v.Decl.Specs {
				spec := spec.(*ast.ValueSpec)
				comments[spec.Names[0].Name] = v.Doc + spec.Doc.Text()
			}
		}
		for name, comment := range comments {
			if comment == "" {
				t.Errorf("%s: %s has no comment", dir, name)
			}
			for _, m := range link.FindAllStringSubmatch(string(p.Text(comment)), -1) {
				t.Errorf("%s: %s: %s leads nowhere", dir, name, m[1])
			}
		}
	}
}
