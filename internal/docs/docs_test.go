package main

import (
	"fmt"
	"go/ast"
	"go/doc"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// root is the root of the module.
const root = "../.."

// read returns the text of a file, by its path from the root.
func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	redistest.Must(t, err)
	return string(text)
}

// The snippets of all pages compile, but for those that call a library which singlefill replaces.
func TestPages_Snippets(t *testing.T) {
	t.Parallel()
	inRoot, inServer := make(map[string]string), make(map[string]string) // by folder: each is a package
	for page, text := range pages(t) {
		for i, snippet := range blocks(text, "go") {
			if !strings.Contains(snippet, "Before") {
				name := regexp.MustCompile(`\W`).ReplaceAllString(strings.TrimSuffix(page, ".md"), "_")
				sources, source := inRoot, compilable(snippet)
				if strings.Contains(source, "sfprometheus") {
					sources = inServer // the module that requires the others
				}
				sources[fmt.Sprint(name, "_", i+1)] = source
			}
		}
	}
	if len(inRoot) < 10 || len(inServer) == 0 {
		t.Errorf("%d and %d snippets found", len(inRoot), len(inServer))
	}
	compile(t, ".", inRoot)
	compile(t, "examples/server", inServer)
}

// A block has a language that a test knows, or none: a drawing.
func TestPages_Blocks(t *testing.T) {
	t.Parallel()
	for page, text := range pages(t) {
		for i, m := range regexp.MustCompile("(?m)^ *```(.*)$").FindAllStringSubmatch(text, -1) {
			if i%2 == 0 && !slices.Contains([]string{"go", "sh", ""}, m[1]) {
				t.Errorf("%s: no test knows a block of %s", page, m[1])
			}
		}
	}
}

// pages returns the text of each page of the repository, by its path from the root.
func pages(t *testing.T) map[string]string {
	t.Helper()
	names, err := files(os.DirFS(root), ".md")
	if err != nil || len(names) < 20 {
		t.Fatalf("pages: %v, %v", names, err)
	}
	all := make(map[string]string)
	for _, name := range names {
		all[name] = read(t, name)
	}
	return all
}

// CONTRIBUTING.md names each script. TestPages_Commands finds those that do not exist.
func TestContributing_Scripts(t *testing.T) {
	t.Parallel()
	text := read(t, "CONTRIBUTING.md")
	scripts, err := fs.Glob(os.DirFS(root), "scripts/*")
	redistest.Must(t, err)
	for _, file := range scripts {
		if !strings.Contains(text, file) {
			t.Errorf("CONTRIBUTING.md does not name %s", file)
		}
	}
}

// The contents of docs names each page.
func TestDocs_Contents(t *testing.T) {
	t.Parallel()
	all := pages(t)
	for page := range all {
		name, inDocs := strings.CutPrefix(page, "docs/")
		if inDocs && !strings.Contains(name, "/") && name != "README.md" && !strings.Contains(all["docs/README.md"], "]("+name) {
			t.Errorf("docs/README.md does not name %s", page)
		}
	}
}

// The program with which README.md begins can be pasted and run.
func TestREADME_Program(t *testing.T) {
	t.Parallel()
	program := blocks(read(t, "README.md"), "go")[0]
	const addr = "127.0.0.1:6379"
	if !strings.Contains(program, addr) {
		t.Fatalf("the program asks no Redis at %s", addr)
	}
	file := filepath.Join(t.TempDir(), "main.go")
	redistest.Must(t, os.WriteFile(file, []byte(strings.ReplaceAll(program, addr, redistest.Start(t).Addr)), 0o600))
	out, err := goCommand("run", file).CombinedOutput()
	if want := "a slow query for 42\n{user 42} <nil>\n{user 42} <nil>\n"; err != nil || string(out) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, out, want)
	}
}

// The table of options names all fields of Options, in their order.
func TestREADME_Options(t *testing.T) {
	t.Parallel()
	_, section, _ := strings.Cut(read(t, "README.md"), "\n## Options\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var named, fields []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1) {
		named = append(named, m[1])
	}
	for f := range reflect.TypeFor[singlefill.Options[any]]().Fields() {
		fields = append(fields, f.Name)
	}
	if !slices.Equal(named, fields) {
		t.Errorf("the table names\n%q\nand Options has\n%q", named, fields)
	}
}

// A link to a part of a page leads to a heading, or to an id. scripts/docs -check finds links that lead to no
// file.
func TestPages_Anchors(t *testing.T) {
	t.Parallel()
	all, found := pages(t), 0
	for page, text := range all {
		for _, m := range regexp.MustCompile(`\]\(([^):\s#]*)#([^)\s]+)\)`).FindAllStringSubmatch(text, -1) {
			to := page
			if m[1] != "" {
				to = path.Join(path.Dir(page), m[1])
			}
			found++
			if target, ok := all[to]; ok && !hasAnchor(target, m[2]) {
				t.Errorf("%s: %s#%s leads nowhere", page, m[1], m[2])
			}
		}
	}
	if found < 10 {
		t.Errorf("%d links found", found)
	}
	if hasAnchor("# One\n## `Two`, or three\n", "two") || !hasAnchor("# One\n## `Two`, or three\n", "two-or-three") {
		t.Error("a heading is not found, or one that does not exist is")
	}
}

// hasAnchor reports whether a page has a heading or an id of this name, as GitHub forms it.
func hasAnchor(text, anchor string) bool {
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		if strings.ReplaceAll(name, " ", "-") == anchor {
			return true
		}
	}
	return strings.Contains(text, `<a id="`+anchor+`">`)
}

// blocks returns the fenced blocks of one language.
func blocks(text, language string) (found []string) {
	for _, m := range regexp.MustCompile("(?ms)^ *```"+language+"\n(.*?)^ *```$").FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	return found
}

// compilable makes a file of a snippet. A snippet that begins with "package" is a file. Any other consists of
// functions, or of statements, which become one, among declarations that the reader can guess.
func compilable(snippet string) string {
	if strings.HasPrefix(snippet, "package ") {
		return snippet
	}
	functions, body := "", snippet
	if regexp.MustCompile(`(?m)^func `).MatchString(snippet) {
		functions, body = strings.ReplaceAll(snippet, "*After", "*after"), ""
	}
	body = functions + `
type Org struct{ Name string }

type User struct {
	Name, OrgID string
	Org         Org
}

type Order struct{ Item string }

type DB struct{}

func (DB) User(ctx context.Context, id string) (user User, err error) { return user, err }

func (DB) Rename(ctx context.Context, id, name string) error { return nil }

func (DB) Users(ctx context.Context, ids []string) (users map[string]User, err error) { return users, err }

var db DB

var ErrNoUser, ErrSuspended error

type Cache interface {
	User(ctx context.Context, id string) (User, error)
	Forget(ctx context.Context, id string) error
}

type after struct {
	db     DB
	cache  *singlefill.Cache[User]
	strong bool
}

var members *singlefill.Cache[User]

var users, orders = members, members

var orgs *singlefill.Cache[Org]

func (DB) Org(ctx context.Context, id string) (org Org, err error) { return org, err }

func (DB) Orgs(ctx context.Context, ids []string) (orgs map[string]Org, err error) { return orgs, err }

func orgsOf(users map[string]User) (ids []string) { return ids }

type Token struct{ Secret string }

func (DB) Token(ctx context.Context, id string) (token Token, err error) { return token, err }

var tokens *singlefill.Cache[Token]

func refused(Token) bool { return false }

var server http.Server

var errLimited error

func secondsIn(text string) string { return text }

var w http.ResponseWriter

type Result struct{ Pages int }

func runReport(ctx context.Context, key string) (r Result, err error) { return r, err }

func snippet(ctx context.Context, rdb redis.UniversalClient, r *http.Request, id, name string, ids []string) error {
	{
` + body + `
		use(` + declared(body) + `)
	}
	return nil
}

func use(...any) {}
`
	var imports strings.Builder
	for _, pkg := range []string{
		"context", "crypto/sha256", "database/sql", "encoding/hex", "errors", "fmt", "log/slog", "net/http", "os", "sync", "time", "github.com/prometheus/client_golang/prometheus",
		"github.com/prometheus/client_golang/prometheus/promhttp", "github.com/redis/go-redis/v9", "github.com/singlefill/singlefill",
		"github.com/singlefill/singlefill/lock",
	} {
		name := strings.TrimPrefix(path.Base(strings.TrimSuffix(pkg, "/v9")), "go-")
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(body) {
			fmt.Fprintf(&imports, "import %q\n", pkg)
		}
	}
	for _, module := range []string{"otel", "prometheus"} {
		if name := "sf" + module; strings.Contains(body, name+".") {
			fmt.Fprintf(&imports, "import %s %q\n", name, "github.com/singlefill/singlefill/"+module)
		}
	}
	return "package snippet\n\n" + imports.String() + body
}

// declared returns the variables that a snippet declares at its outermost level. The reader will
// use them.
func declared(snippet string) string {
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^(\w+(?:, \w+)*) := `).FindAllStringSubmatch(snippet, -1) {
		names = append(names, m[1])
	}
	return strings.Join(names, ", ")
}

// compile fails the test with the errors that a compiler finds in files, each of which is a package. What they import
// is compiled as for a module.
func compile(t *testing.T, module string, sources map[string]string) {
	t.Helper()
	fset := token.NewFileSet()
	files, imports := make(map[string]*ast.File), make(map[string]bool)
	for name, source := range sources {
		f, err := parser.ParseFile(fset, name, source, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		files[name] = f
		for _, spec := range f.Imports {
			pkg, err := strconv.Unquote(spec.Path.Value)
			redistest.Must(t, err)
			imports[pkg] = true
		}
	}
	list := slices.Concat([]string{"list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}"}, slices.Sorted(maps.Keys(imports)))
	cmd := exec.Command("go", list...)
	cmd.Dir = filepath.Join(root, module) // what it requires may not have been downloaded
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, err.(*exec.ExitError).Stderr)
	}
	compiled := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		pkg, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		compiled[pkg] = file
	}
	config := types.Config{
		Importer: importer.ForCompiler(fset, "gc", func(pkg string) (io.ReadCloser, error) { return os.Open(compiled[pkg]) }),
		Error:    func(err error) { t.Error(err) },
	}
	for name, f := range files {
		_, _ = config.Check(name, fset, []*ast.File{f}, nil) // Error has told
	}
}

// goCommand runs the go tool in the root of the module, without downloads.
func goCommand(args ...string) *exec.Cmd {
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GOPROXY=off")
	return cmd
}

// Everything exported has a comment, links in comments lead somewhere, and every example is run.
func TestGodoc_IsWhole(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`(?m)^(?:[^\t\n].*)?(\[\*?[A-Z][\w.]*\])`) // a line that begins with a tab is code
	for _, dir := range []string{".", "lock", "singlefilltest", "prometheus", "otel", "compress"} {
		var files []*ast.File
		fset := token.NewFileSet()
		names, _ := filepath.Glob(filepath.Join(root, dir, "*.go")) // the pattern is a good one
		for _, name := range names {
			f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
			redistest.Must(t, err)
			files = append(files, f)
		}
		for _, e := range doc.Examples(files...) {
			if e.Output == "" {
				t.Errorf("%s: Example%s has no output, so it is never run", dir, e.Name)
			}
		}
		p, err := doc.NewFromFiles(fset, files, filepath.Join("github.com/singlefill/singlefill", dir))
		redistest.Must(t, err)
		comments, funcs, vars := map[string]string{"the package": p.Doc}, p.Funcs, p.Vars
		for _, typ := range p.Types {
			comments[typ.Name] = typ.Doc
			funcs, vars = slices.Concat(funcs, typ.Funcs, typ.Methods), append(vars, typ.Vars...)
		}
		for _, f := range funcs {
			if f.Name != "Error" { // its name is its comment
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
