-- Give up an attempt: leave the queue, give back a grant that has come meanwhile, and refuse a command that is
-- still on its way; all in one step.
--
-- KEYS  1 lock  2 tombstone of this attempt  3 queue  4 alive
-- ARGV  1 token  2 how long a command may still be on its way, ms
--
-- Returns 1 released, 0 it held nothing.

local refused
local function try(...) -- a foreign key is no reason to leave the others as they are; a refusal is one to try again
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then refused = refused or reply end
end

local taken = 0
try('ZREM', KEYS[3], ARGV[1])
try('ZREM', KEYS[4], ARGV[1])
if try('GET', KEYS[1]) == ARGV[1] then
  try('DEL', KEYS[1])
  taken = 1
end
try('SET', KEYS[2], 'abandoned', 'PX', ARGV[2])
return refused or taken
