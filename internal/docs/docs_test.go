package main

import (
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/singlefill/singlefill"
)

// root is the root of the module.
const root = "../.."

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The snippets of README.md compile.
func TestREADME_Snippets(t *testing.T) {
	t.Parallel()
	snippets := blocks(readme(t), "go")
	if len(snippets) < 2 {
		t.Fatalf("%d snippets found", len(snippets))
	}
	for i, snippet := range snippets {
		t.Run(fmt.Sprint(i+1), func(t *testing.T) {
			t.Parallel()
			if out := vet(t, compilable(snippet)); out != "" {
				t.Errorf("%s\n%s", out, snippet)
			}
		})
	}
}

// A wrong snippet is found, or TestREADME_Snippets would show nothing.
func TestREADME_WrongSnippet(t *testing.T) {
	t.Parallel()
	snippet := blocks(readme(t), "go")[0]
	wrong := strings.Replace(snippet, "GetOrLoad(", "GetOrLode(", 1)
	if wrong == snippet {
		t.Fatal("the first snippet does not call GetOrLoad")
	}
	if out := vet(t, compilable(wrong)); !strings.Contains(out, "GetOrLode") {
		t.Errorf("go vet found nothing: %q", out)
	}
}

// The commands of README.md exist.
func TestREADME_Commands(t *testing.T) {
	t.Parallel()
	var commands []string
	for _, block := range blocks(readme(t), "sh") {
		commands = append(commands, strings.Split(strings.TrimSpace(block), "\n")...)
	}
	if want := []string{"go get github.com/singlefill/singlefill", "go run ./examples/quickstart", "scripts/test"}; !slices.Equal(commands, want) {
		t.Errorf("the commands are %q, not %q", commands, want)
	}
	for _, command := range commands[1:] {
		if dir, found := strings.CutPrefix(command, "go run "); found {
			if out, err := goCommand("list", "-f", "{{.Name}}", dir).Output(); strings.TrimSpace(string(out)) != "main" {
				t.Errorf("%s: package %q, %v", command, out, err)
			}
		} else if info, err := os.Stat(filepath.Join(root, command)); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s cannot be executed: %v", command, err)
		}
	}
}

// The table of options names all fields of Options, in their order.
func TestREADME_Options(t *testing.T) {
	t.Parallel()
	_, section, _ := strings.Cut(readme(t), "\n## Options\n")
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

// The links of README.md lead to files.
func TestREADME_Links(t *testing.T) {
	t.Parallel()
	for _, m := range regexp.MustCompile(`\]\(([^)#:\s]+)\)`).FindAllStringSubmatch(readme(t), -1) {
		if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
			t.Error(err)
		}
	}
}

// blocks returns the fenced blocks of one language.
func blocks(text, language string) (found []string) {
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	return found
}

// compilable makes a file of a snippet. A snippet that begins with "package" is a file. Any other
// consists of statements, which become a function among declarations that the reader can guess.
func compilable(snippet string) string {
	if strings.HasPrefix(snippet, "package ") {
		return snippet
	}
	body := `
type User struct{ Name string }

type database struct{}

func (database) User(ctx context.Context, id string) (user User, err error) { return user, err }

func (database) Users(ctx context.Context, ids []string) (users map[string]User, err error) { return users, err }

var db database

var members *singlefill.Cache[User]

var users, orders = members, members

func snippet(ctx context.Context, rdb redis.UniversalClient, ids []string) error {
	{
` + snippet + `
		use(` + declared(snippet) + `)
	}
	return nil
}

func use(...any) {}
`
	var imports strings.Builder
	for _, path := range []string{
		"context", "database/sql", "errors", "log/slog", "time", "github.com/prometheus/client_golang/prometheus",
		"github.com/redis/go-redis/v9", "github.com/singlefill/singlefill",
	} {
		name := strings.TrimPrefix(filepath.Base(strings.TrimSuffix(path, "/v9")), "go-")
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(body) {
			fmt.Fprintf(&imports, "import %q\n", path)
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

// vet returns what the compiler and go vet have to say about a file that imports this module.
func vet(t *testing.T, source string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "snippet.go")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := goCommand("vet", file)
	if strings.Contains(source, "sfprometheus") { // a module that requires the others
		cmd.Dir = filepath.Join(root, "examples", "server")
		cmd.Env = os.Environ() // what it requires may not have been downloaded
	}
	out, err := cmd.CombinedOutput()
	if err == nil {
		return ""
	}
	return fmt.Sprintf("%v\n%s", err, out)
}

// goCommand runs the go tool in the root of the module, with what the module cache has.
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
	for _, dir := range []string{".", "lock", "singlefilltest", "prometheus", "otel"} {
		var files []*ast.File
		fset := token.NewFileSet()
		names, _ := filepath.Glob(filepath.Join(root, dir, "*.go")) // the pattern is a good one
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
