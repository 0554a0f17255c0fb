// Command systems type-checks all packages and tests of modules for systems on which they do not run here:
//
//	go run ./internal/systems MODULE...
//
// It finds what a system lacks: a function of the operating system, a file behind a build constraint, a
// constant that an int of 32 bits cannot hold. It reads the dependencies without their function bodies and
// generates no code, so that it takes seconds where go vet, which compiles the dependencies for each
// system, takes minutes. It does not show that a program links or runs.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

var systems = []string{"windows/amd64", "darwin/arm64", "linux/arm64", "linux/386"}

func main() {
	errs := make([]error, len(systems))
	var all sync.WaitGroup
	for i, system := range systems {
		all.Go(func() { errs[i] = check(system, os.Args[1:]) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// check type-checks modules for a system, such as linux/386.
func check(system string, modules []string) error {
	goos, goarch, _ := strings.Cut(system, "/")
	c := checker{
		system:   system,
		env:      append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"),
		sizes:    types.SizesFor("gc", goarch),
		fset:     token.NewFileSet(),
		standard: map[string]*types.Package{"unsafe": types.Unsafe},
	}
	for _, module := range modules {
		if err := c.module(module); err != nil {
			c.report(err)
		}
	}
	return errors.Join(c.errs...)
}

// A checker checks modules for one system. They share the packages of the standard library, but not
// others, of which they may require different versions.
type checker struct {
	system   string
	env      []string
	sizes    types.Sizes
	fset     *token.FileSet
	standard map[string]*types.Package
	errs     []error
}

func (c *checker) report(err error) { c.errs = append(c.errs, fmt.Errorf("%s: %w", c.system, err)) }

// A listed package is what go list -json prints of a package, or of a package with its tests.
type listed struct {
	ImportPath, Dir string
	Standard        bool
	GoFiles         []string
	ImportMap       map[string]string
	Module          *struct {
		Main      bool
		GoVersion string
	}
	Error *struct{ Err string }
}

func (c *checker) module(folder string) error {
	list := exec.Command("go", "list", "-e", "-deps", "-test",
		"-json=ImportPath,Dir,Standard,GoFiles,ImportMap,Module,Error", "./...")
	list.Dir, list.Env, list.Stderr = folder, c.env, os.Stderr
	out, err := list.Output()
	if err != nil {
		return err
	}
	others := map[string]*types.Package{}
	for packages := json.NewDecoder(bytes.NewReader(out)); ; { // dependencies come before what imports them
		var p listed
		if err := packages.Decode(&p); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		switch {
		case p.Error != nil:
			c.report(fmt.Errorf("%s: %s", p.ImportPath, p.Error.Err))
		case strings.HasSuffix(p.ImportPath, ".test"): // the main package of a test is generated
		case !p.Standard:
			others[p.ImportPath] = c.check(p, others)
		case c.standard[p.ImportPath] == nil:
			c.standard[p.ImportPath] = c.check(p, nil)
		}
	}
}

// check type-checks a package, whose imports have been checked.
func (c *checker) check(p listed, others map[string]*types.Package) *types.Package {
	path, _, _ := strings.Cut(p.ImportPath, " ") // "path [path.test]" is the package with its tests
	own := p.Module != nil && p.Module.Main
	config := types.Config{
		Sizes:            c.sizes,
		IgnoreFuncBodies: !own,
		Importer: importer(func(path string) *types.Package {
			path = cmp.Or(p.ImportMap[path], path)
			return cmp.Or(others[path], c.standard[path])
		}),
		Error: func(err error) {
			if own {
				c.report(err)
			}
		},
	}
	if p.Module != nil {
		config.GoVersion = "go" + cmp.Or(p.Module.GoVersion, "1.16")
	}
	var files []*ast.File
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(c.fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			c.report(err)
			continue
		}
		files = append(files, file)
	}
	pkg, _ := config.Check(path, c.fset, files, nil) // Error has the errors
	return pkg
}

type importer func(path string) *types.Package

func (i importer) Import(path string) (*types.Package, error) {
	if p := i(path); p != nil {
		return p, nil
	}
	return nil, errors.New("not found") // go list has told why
}
